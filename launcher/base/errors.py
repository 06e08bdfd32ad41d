"""The errors a user can cause, each with the exit code the command line documents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

MOST_LISTED = 24


class LauncherError(Exception):
    """What went wrong and where, and how to mend it; printed without a traceback."""

    exit_code = 2

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  {self.remedy}" if self.remedy else self.problem


class UsageError(LauncherError):
    """A wrong argument or a wrong file."""


class Faults:
    """Collects what is wrong with a run, so that all of it is reported at once."""

    def __init__(self) -> None:
        self.found: list[UsageError] = []

    def add(self, problem: str, remedy: str = "") -> None:
        """Something that is wrong."""
        self.found.append(UsageError(problem, remedy))

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Take in a UsageError that is raised within."""
        try:
            yield
        except UsageError as error:
            self.found.append(error)

    def refuse(self) -> None:
        """Raise UsageError with all that was found, if anything was."""
        if len(self.found) == 1:
            raise self.found[0]
        if self.found:
            raise UsageError("\n".join(map(str, self.found)))


class PreflightError(LauncherError):
    """The run can't work on this machine as it is configured."""

    exit_code = 121


class BuildError(LauncherError):
    """An image could not be built or failed its checks."""

    exit_code = 122


class UnfollowedError(LauncherError):
    """A run goes on, but the launcher that followed it can't."""

    exit_code = 123


class EngineError(LauncherError):
    """No container engine, or it refused."""

    exit_code = 125


class AbsentError(EngineError):
    """No container engine at all: none was named, and none has a socket here."""


def nearest(word: str, known: list[str]) -> str:
    """A "did you mean" remedy for `word`, or the list of what is known."""
    from difflib import SequenceMatcher

    def likeness(one: str) -> tuple[float, int]:
        """How alike, then for how long: 0.13.1 is nearer to 0.13.0 than 0.19.0 is."""
        differing = (at for at, (a, b) in enumerate(zip(one, word, strict=False)) if a != b)
        return SequenceMatcher(None, one, word).ratio(), next(differing, len(word))

    begun = [one for one in known if word and one.startswith(word)]
    alike = sorted((one for one in known if likeness(one)[0] >= 0.55), key=likeness)
    initials = "".join(part[:1] for part in word.split("_"))  # learning_rate: lr
    close = begun[:1] or alike[-1:] or [one for one in known if one == initials]
    listed = ", ".join(known if len(known) <= MOST_LISTED else [*known[:MOST_LISTED], "…"])
    return f"Did you mean {close[0]!r}? Known: {listed}" if close else f"Known: {listed}"


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong with a document, in a line, with the keys that lead there."""
    fault = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
