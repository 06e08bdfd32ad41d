"""What backends without an engine share: this machine's programs, a folder for each run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import ClassVar, TypeVar

from launcher.base.errors import EngineError
from launcher.base.names import LABEL
from launcher.runs.plan.job import Backend, ConnectionLost, ExitStatus, Job
from launcher.runs.records import failed_nodes
from launcher.runs.runfile.clusters import Exclude

AnyJob = TypeVar("AnyJob", bound=Job)
Answer = TypeVar("Answer", bound="SchedulerQuery")
LONGEST = 2000
"""Characters of another program's reason."""

ASK_SECONDS = 2.0
"""How often a scheduler is asked for jobs at most: it serves everybody."""


def count_gpus() -> int | None:
    """The GPUs that the driver lists; None where there is no driver to ask."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None


def ask(
    argv: Sequence[str],
    remedy: str,
    *,
    env: Mapping[str, str] | None = None,
    given: str = "",
    timeout: float = 60,
) -> str:
    """A program's output for this input. EngineError: it isn't there (`remedy`), or fails."""
    name = argv[0]
    if shutil.which(name) is None:
        raise EngineError(f"there is no {name} here", remedy)
    try:
        done = subprocess.run(
            argv,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=env,
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{name}: no answer within {timeout:.0f} s") from error
    except OSError as error:
        raise EngineError(f"{name}: {error.strerror}", remedy) from error
    if done.returncode:
        told = done.stderr.strip() or done.stdout.strip()
        raise EngineError(f"{name}: {told[:LONGEST] or f'exit code {done.returncode}'}")
    return done.stdout


def tell(text: str) -> None:
    """A line of the launcher's own."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


def number(path: Path) -> int | None:
    """What a file holds; None where it isn't there, or isn't written to its end."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(kw_only=True)
class SchedulerQuery:
    """A scheduler's answer on all jobs, asked now and then; a backend adds `ask` (EngineError)."""

    asked_at: float = -ASK_SECONDS
    told: set[str] = field(default_factory=set)
    lock: Lock = field(default_factory=Lock, repr=False)

    def ask(self) -> None:
        raise NotImplementedError

    def fresh(self: Answer, age: float = ASK_SECONDS) -> Answer:
        """An answer of `age` seconds ago at most. Raises ConnectionLost."""
        with self.lock:
            if time.monotonic() - self.asked_at >= age:
                try:
                    self.ask()
                except EngineError as error:
                    raise ConnectionLost(error.problem) from error
                self.asked_at = time.monotonic()
        return self

    def forget(self) -> None:
        """Ask anew the next time."""
        self.asked_at = -ASK_SECONDS

    def tell(self, text: str) -> None:
        """Warn, once."""
        if text not in self.told:
            self.told.add(text)
            tell(text)


def left_out(asked: Exclude) -> list[str]:
    """The nodes that `exclude: auto` leaves out, which are reported."""
    found = failed_nodes.left_out(asked)
    for node, causes in found.items():
        told = f"{len(causes)} failures in {asked.days} days ({', '.join(sorted({*causes}))})"
        tell(f"{node} is left out: {told}")
    return [*found]


class SchedulerBackend(Backend):
    """What backends have in common for which a scheduler chooses the machines."""

    scheduled = True

    def facts(self, image: str) -> None:
        """What is on the nodes isn't known here: the run file's release counts."""

    def count_gpus(self) -> None:
        """Nor how many GPUs they have."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)


class PolledJob:
    """A job that is polled; a backend adds `ended`, `kill`, and `ask` to stop without waiting."""

    poll_seconds: ClassVar[float] = 0.2

    def ended(self) -> ExitStatus | None:
        raise NotImplementedError

    def ask(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def wait(self) -> ExitStatus:
        while (ended := self.ended()) is None:
            time.sleep(self.poll_seconds)
        return ended

    def stop(self, grace: int) -> None:
        self.ask()
        until = time.monotonic() + grace
        while self.ended() is None and time.monotonic() < until:
            time.sleep(self.poll_seconds)
        if self.ended() is None:
            self.kill()


@dataclass
class FolderJob(PolledJob):
    """A run and its folder, whose files have its state."""

    folder: Path

    @property
    def run(self) -> str:
        return self.folder.name

    def stop(self, grace: int) -> None:
        super().stop(grace)
        self.wait()

    def files(self, path: str) -> dict[str, bytes]:
        try:
            found = [*Path(path).iterdir()] if Path(path).is_dir() else [Path(path)]
            return {one.name: one.read_bytes() for one in found if one.is_file()}
        except OSError:
            return {}


def newest_first(jobs: Iterable[AnyJob]) -> list[AnyJob]:
    """The jobs by the time at which their runs were made."""
    return sorted(jobs, key=lambda job: job.labels.get(f"{LABEL}created", ""), reverse=True)
