"""Times commands in turn, A B A B …, so that a machine's drift meets all of them alike."""

from __future__ import annotations

import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One measured quantity beside its goal; `value` and `goal` in the same unit."""

    name: str
    value: float
    goal: float
    unit: str

    def __str__(self) -> str:
        verdict = "holds" if self.value <= self.goal else "MISSED"
        return f"{self.name:<62} {self.value:8.2f} {self.unit:<2} (at most {self.goal:g}) {verdict}"


def interleaved(
    commands: dict[str, list[str]], runs: int = 7, env: dict[str, str] | None = None
) -> dict[str, float]:
    """The median wall time in seconds of each command, after one uncounted run of each.

    Raises CalledProcessError where a command fails.
    """
    times: dict[str, list[float]] = {name: [] for name in commands}
    for turn in range(runs + 1):
        for name, command in commands.items():
            seconds = timed(command, env)
            if turn:
                times[name].append(seconds)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def timed(command: list[str], env: dict[str, str] | None = None) -> float:
    """The wall time in seconds of one run of a command, its output kept from the screen.

    Its modules are byte-compiled, as a user's are, also where this process's aren't.
    """
    variables = {**os.environ, **(env or {}), "PYTHONDONTWRITEBYTECODE": ""}
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=variables, check=True, capture_output=True)
    return time.perf_counter() - started
