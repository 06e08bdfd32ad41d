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

from launcher import files
from launcher.data import output
from launcher.data.output import Busy, alone


def fails(number: int) -> Callable[..., NoReturn]:
    def flock(file: object, operation: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return flock


def test_a_file_is_one_jobs(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with ExitStack() as first:
        (ours,) = alone([target], first)
        ours.file.write(b"ours")
        with ExitStack() as second, pytest.raises(Busy, match="another job writes it"):
            alone([target], second)
        assert ours.path.exists()
    assert not os.listdir(tmp_path)
    files.aside_path(target, "0" * 16).write_bytes(b"left by a killed job")
    with ExitStack() as third:
        alone([target], third)
        assert len(os.listdir(tmp_path)) == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", files.UNLOCKABLE)
def test_a_file_system_without_locks_is_written_and_a_broken_or_open_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(number))
    with ExitStack() as stack:
        assert alone([tmp_path / "a"], stack)[0].file.write(b"text") == 4
    monkeypatch.setattr(fcntl, "flock", fails(errno.EIO))
    with ExitStack() as stack, pytest.raises(OSError, match="Input/output error"):
        alone([tmp_path / "b"], stack)
    monkeypatch.undo()
    tmp_path.chmod(0o777)
    with ExitStack() as stack, pytest.raises(files.Refused, match="everybody"):
        alone([tmp_path / "c"], stack)


def test_who_waits_goes_on_when_the_file_is_free(tmp_path: Path) -> None:
    output.wait(tmp_path / "absent.bin")
    waiting = threading.Thread(target=output.wait, args=(tmp_path / "a.bin",))
    with ExitStack() as stack:
        alone([tmp_path / "a.bin"], stack)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()
