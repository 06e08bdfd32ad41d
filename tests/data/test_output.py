"""Files that one job writes: locked where the file system can, and told apart where it can't."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import pytest

from launcher.data import output
from launcher.data.output import Busy, locked


def fails(number: int) -> Callable[..., NoReturn]:
    def flock(file: object, operation: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return flock


def test_a_file_is_one_jobs(tmp_path: Path) -> None:
    target, path = tmp_path / "a", tmp_path / "a.partial"
    with ExitStack() as first:
        locked(target, first).write(b"ours")
        with ExitStack() as second, pytest.raises(Busy, match="another job writes it"):
            locked(target, second)
        assert path.exists()
    assert not path.exists()
    path.write_bytes(b"left by a killed job")
    with ExitStack() as third:
        locked(target, third)
        assert path.read_bytes() == b""


@pytest.mark.parametrize("number", output.UNLOCKABLE)
def test_a_file_system_without_locks_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(number))
    with ExitStack() as files:
        assert locked(tmp_path / "a", files).write(b"text") == 4


def test_another_fault_is_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(errno.EIO))
    with ExitStack() as files, pytest.raises(OSError, match=r"Input/output error: '.*/a\.partial'"):
        locked(tmp_path / "a", files)


def test_who_waits_goes_on_when_the_file_is_free(tmp_path: Path) -> None:
    output.wait(tmp_path / "absent")
    waiting = threading.Thread(target=output.wait, args=(tmp_path / "a",))
    with ExitStack() as files:
        locked(tmp_path / "a.bin", files)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
