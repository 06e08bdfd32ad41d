"""A run that is known by its folder: what those that no engine keeps have in common."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from launcher.names import LABEL
from launcher.plan.job import Ended, Job

AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass
class FolderJob:
    """A run and its folder, whose files tell of it.

    A backend adds `ended` and `kill`, and `ask`, which asks it to stop and doesn't wait.
    """

    folder: Path

    poll_seconds: ClassVar[float] = 0.2

    def ended(self) -> Ended | None:
        raise NotImplementedError

    def ask(self) -> None:
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    @property
    def run(self) -> str:
        return self.folder.name

    def wait(self) -> Ended:
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
