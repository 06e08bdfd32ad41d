"""Who follows a run: told by a lock that ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.records import owner
from launcher.settings import ROOT

HOLDER = """\
import sys
from launcher.records import owner
with owner.following("0a1b2c3d") as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(runs: Path) -> str:
    """A run with a folder for its record."""
    (runs / "0a1b2c3d").mkdir(parents=True)
    return "0a1b2c3d"


def test_the_first_of_two_owns_the_run_until_it_is_killed(run: str) -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "True\n"
        with owner.following(run) as mine:
            assert not mine
        with owner.following("ffffffff") as mine:  # a run without a record
            assert mine
        assert owner.stop_in_pause(run)
        assert owner.asked_to_stop(run)
        holder.kill()
        holder.wait()
        with owner.following(run) as mine:
            assert mine
    (owner.settings().runs / "0b1b2c3d").mkdir()
    assert not owner.stop_in_pause("0b1b2c3d")  # nobody waits there
    assert not owner.asked_to_stop("0b1b2c3d")


def test_one_that_starts_keeps_the_next_waiting(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner, "PATIENCE", 0.2)
    began = []
    with owner.alone():
        handle = os.open(owner.settings().runs / owner.STARTING, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with owner.alone():  # no longer than that
            began.append(True)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)
    assert began
