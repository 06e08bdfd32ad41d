"""What a disk that fills up and is freed again leaves of a log, by the limit on a file's size."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base.logfile import LogFile, keep_room
from tests.disks import limited

GAP = re.compile(rb"\nlauncher: (\d+) bytes are missing here, which couldn't be written\n")
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 500)), max_size=20))
def test_each_byte_is_there_in_its_order_or_counted_as_missing(
    tmp_path: Path, writes: list[tuple[int, int]]
) -> None:
    log = LogFile(os.open(tmp_path / "log", FLAGS, 0o600))
    said, number = b"", 0
    for size, limit in [*writes, (1, 1 << 20)]:
        data = bytes(128 + (number := number + 1) % 128 for _ in range(size))
        said += data
        with limited(limit):
            log.write(data)
    os.close(log.handle)
    assert (log.error, log.missing) == (None, 0)
    at = 0
    kept = (tmp_path / "log").read_bytes()
    for part, missing in zip(*[iter([*GAP.split(kept), b"0"])] * 2, strict=True):
        own = re.sub(rb"[\x00-\x7f]+", b"", part)  # a note may have been cut short
        assert said[at:].startswith(own)
        at += len(own) + int(missing)
    assert at == len(said)


def test_room_is_kept_without_a_length(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "log", FLAGS, 0o600)
    os.write(handle, b"one\n")
    keep_room(handle, 1 << 16)
    status = os.fstat(handle)
    os.close(handle)
    assert status.st_size == 4
    assert status.st_blocks * 512 >= 1 << 16


def test_room_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    handle = os.open(tmp_path / "log", FLAGS, 0o600)
    with pytest.raises(OSError, match=r"No space left|too large"):
        keep_room(handle, 1 << 55)
    os.close(handle)
