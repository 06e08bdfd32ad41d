"""A folder for a test's records alone, and a run that stands in for a backend's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.runs.plan.job import ConnectionLost, ExitStatus, OutputPiece
from tests.e2e.site import until

RUN = "0a1b2c3d"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they lie; it is made with the first."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def kept(runs: Path) -> Path:
    """The folder of a run's record."""
    (runs / RUN).mkdir(parents=True)
    return runs / RUN


@dataclass
class FakeJob:
    """A run that writes `pieces` and ends with `end`; `cut` is the piece at which it is lost.

    With `waits` it goes on until it is asked to stop, or killed. An error as its end is raised.
    """

    pieces: list[OutputPiece] = field(default_factory=list)
    end: ExitStatus | Exception = field(default_factory=lambda: ExitStatus(0))
    cut: int | None = None
    waits: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    over: bool = False
    run: str = RUN
    doing: str = "running"
    calls: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    backend = "fake"
    handle = "fake"

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        for number, piece in enumerate(self.pieces):
            if number == self.cut:
                raise ConnectionLost("cut off")
            yield piece
        if self.cut is not None:
            raise ConnectionLost("cut off")

    def wait(self) -> ExitStatus:
        if self.waits:
            until(self.ending.is_set)  # signals are handled in between
        assert isinstance(self.end, ExitStatus)
        return self.end

    def ended(self) -> ExitStatus | None:
        if isinstance(self.end, Exception):
            raise self.end
        return self.end if self.over else None

    def state(self) -> str:
        return self.doing

    def stop(self, grace: int) -> None:
        self.calls.append(f"stop {grace}")
        self.ending.set()

    def kill(self) -> None:
        self.calls.append("kill")
        self.ending.set()

    def remove(self) -> None:
        self.calls.append("remove")
