"""What holds of every attack: it ends soon, takes little memory, and changes nothing elsewhere."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
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


def memory_of(work: Callable[[], object], within: int = 300) -> int:
    """The bytes that a child takes for it; it may hang, fill the memory or crash. Forked."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(within)
        code = 1
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
            before = _peak()
            work()
            Path("taken").write_text(str(_peak() - before))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0, f"it ended with {status}"
    return int(Path("taken").read_text())


def _peak() -> int:
    (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(line) << 10


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def put(path: Path, kind: str, elsewhere: Path = Path()) -> None:
    """Make something there that is no file; `elsewhere`: what a link leads to."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "elsewhere":
        path.symlink_to(elsewhere)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        here = os.getcwd()
        os.chdir(path.parent)  # a socket's path has 107 bytes at most
        try:
            with socket.socket(socket.AF_UNIX) as one:
                one.bind(path.name)
        finally:
            os.chdir(here)


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
