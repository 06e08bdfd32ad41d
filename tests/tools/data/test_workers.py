"""Processes that work on pieces: what becomes of one that fails, is killed or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.tools.data.faults import DataError
from launcher.tools.data.workers import Workers

ROOT = Path(__file__).parents[3]


class Panic(BaseException):
    """As PyO3 raises it."""


class OfTwoError(Exception):
    """Its pickle doesn't load."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


class Unpicklable(ValueError):
    """It holds what can't be sent."""

    def __init__(self) -> None:
        super().__init__("of a", lambda: None)


def work(piece: object) -> object:
    """Raises what it is given, or does what a signal does."""
    if isinstance(piece, signal.Signals):
        os.kill(os.getpid(), piece)
    if piece == "panic":
        raise Panic("index out of bounds")
    if piece == "two":
        raise OfTwoError("one", "another")
    if piece == "unpicklable":
        raise Unpicklable
    if piece == "user's":
        raise DataError("a problem", "a remedy")
    return piece


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        ("panic", "a worker failed: Panic: index out of bounds"),
        ("two", "a worker failed: OfTwoError: one and another"),
        ("unpicklable", r"a worker failed: Unpicklable: \('of a', <function"),
        ("user's", "^a problem\n  a remedy$"),
        (signal.SIGKILL, "a worker ended with -9: was there too little memory"),
        (signal.SIGTERM, "^a worker ended with -15$"),
    ],
)
def test_a_failure_is_told(piece: object, said: str) -> None:
    """Also where this process handles signals, as one with an engine of its own does."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    workers: Workers[object, object] = Workers(work, 2)
    try:
        with pytest.raises(DataError, match=said):
            list(workers.map([1, piece, 2, 3]))
    finally:
        signal.signal(signal.SIGTERM, before)


JOB = r"""
import os, signal, sys, time
from launcher.tools.data.workers import Workers

def work(piece):
    os.write(1, b"%d\n" % os.getpid())
    if sys.argv[1] == "busy":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSTOP)

try:
    list(Workers(work, 2).map([1, 2, 3]))
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize("state", ["busy", "stopped"])
@pytest.mark.parametrize("ended", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_job(state: str, ended: signal.Signals) -> None:
    """A stopped one reads no pipe and heeds no SIGTERM; it would hold the outputs' locks."""
    job = subprocess.Popen(
        [sys.executable, "-c", JOB, state],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert job.stdout
    workers = [int(job.stdout.readline()) for _ in range(2)]
    try:
        job.send_signal(ended)
        said = job.communicate(timeout=300)[1]  # the pipes are closed when the last of them ends
        assert job.returncode == {signal.SIGINT: 130, signal.SIGKILL: -9}[ended]
        assert said == ""
    finally:
        job.kill()
        for worker in workers:
            if Path(f"/proc/{worker}").exists():
                os.kill(worker, signal.SIGKILL)
