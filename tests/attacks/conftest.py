"""What holds of every attack: it ends soon, takes little memory, and changes nothing elsewhere."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SECONDS, MEMORY = 2.0, 512 << 20
TENS = [0, *(pytest.param(ten, marks=pytest.mark.long) for ten in range(1, 10))]
"""Of a hundred damaged files: the first ten in every run."""
ENDLESS = 20
"""Seconds after which what waits, or is kept waiting by other programs, is taken for endless."""


@contextmanager
def bounded() -> Iterator[None]:
    """Fail where it takes more than SECONDS of a processor, or MEMORY, or doesn't end."""

    def late(*_: object) -> None:
        raise AssertionError(f"it hasn't ended within {ENDLESS} s")

    handler = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, ENDLESS)
    begun, before = time.process_time(), _most_memory()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert time.process_time() - begun < SECONDS
    assert _most_memory() - before < MEMORY


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(autouse=True)
def nothing_elsewhere_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare the tree around the test's working folder, before and after."""
    around = tmp_path.parent
    (around / "of-others").mkdir(exist_ok=True)
    (around / "of-others/file").write_bytes(b"theirs")
    monkeypatch.chdir(tmp_path)
    names, before = {*around.iterdir()}, _tree(around / "of-others")
    yield
    assert _tree(around / "of-others") == before
    assert {*around.iterdir()} <= names


def _tree(folder: Path) -> dict[Path, tuple[int, int, int]]:
    found = {path: path.lstat() for path in (folder, *folder.rglob("*"))}
    return {path: (one.st_mode, one.st_size, one.st_mtime_ns) for path, one in found.items()}
