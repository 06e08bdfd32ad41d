"""Known failures, by what a run wrote before it ended: what it was, and what mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import yaml

from launcher.plan.job import Ended

TABLE = Path(__file__).with_name("failures.yaml")
LONGEST_QUOTE = 160


@dataclass(frozen=True)
class Failure:
    """A row of failures.yaml, which says what its keys are; `quote` is the line that told it."""

    name: str
    cure: str
    says: tuple[str, ...]
    cause: str = ""
    sets: str = ""
    texts: tuple[str, ...] = ()
    quote: str = ""

    @property
    def lines(self) -> list[str]:
        """What to tell of it."""
        quoted = f": {self.quote}" if self.quote else ""
        return [f"cause: {self.name}{quoted}", f"cure: {self.cure}"]


@cache
def table() -> tuple[Failure, ...]:
    """All that are known."""
    return tuple(Failure(**row) for row in yaml.safe_load(TABLE.read_text(encoding="utf-8")))


def named(tail: str, ended: Ended) -> list[Failure]:
    """The known failures in a failed run's last output, by the table's order."""
    found = []
    for known in table():
        if said := re.search("|".join(known.says), tail, re.MULTILINE):
            found.append(replace(known, quote=_quote(tail, said)))
        elif known.cause == ended.cause.value:
            found.append(known)
    return found


def _quote(tail: str, said: re.Match[str]) -> str:
    """The last line of a match, as far as it fits on one of the launcher's."""
    start = tail.rfind("\n", 0, said.end()) + 1
    end = tail.find("\n", said.end())
    line = tail[start : end if end >= 0 else len(tail)].strip()
    return line if len(line) <= LONGEST_QUOTE else f"{line[:LONGEST_QUOTE]}…"
