"""One run at a time holds a folder of checkpoints, on a file system with locks or without."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.agent.checkpoints import folders, hold, lineage
from launcher.agent.checkpoints.hold import FolderHeldError, Hold
from launcher.base import files

from .test_folders import distributed

A, B = "aaaaaaaa", "bbbbbbbb"

OTHER = """
import sys
from pathlib import Path
from launcher.base import files
from launcher.agent.checkpoints import folders, hold, lineage
from tests.agent.test_folders import distributed
root, locks = Path(sys.argv[1]), sys.argv[2] == "locks"
hold.BEAT_SECONDS = 0.05
lineage.PATIENCE_SECONDS = 0.5
if not locks:
    files.try_lock = lambda *_, **__: None
    hold.kernel = lambda: "another machine"
held = hold.Hold(root, "aaaaaaaa", print)
mine = held.claim("aaaaaaaa")
held.watch(lambda why: print("lost:", why, flush=True))
distributed(folders.partial(root, 3, mine))
print("holds", flush=True)
sys.stdin.readline()
try:
    folders.publish(root, 3, mine)
except FileExistsError as error:
    print("refused:", error.strerror, flush=True)
sys.stdin.readline()
held.release()
"""

Start = Callable[[str], contextlib.AbstractContextManager["subprocess.Popen[str]"]]


@pytest.fixture
def other(tmp_path: Path) -> Start:
    """Starts run A in a process of its own, which saves when it gets a line."""

    @contextlib.contextmanager
    def start(locks: str) -> Iterator[subprocess.Popen[str]]:
        argv = [sys.executable, "-c", OTHER, str(tmp_path), locks]
        with subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        ) as started:
            try:
                assert started.stdout
                assert started.stdout.readline() == "holds\n"
                yield started
            finally:
                started.kill()  # one that is stopped would be waited for without end

    return start


def stop(process: subprocess.Popen[str]) -> None:
    """Stop it, and return once it sends no heartbeat any more."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def line(process: subprocess.Popen[str], said: str = "") -> str:
    """What it says next, once it has got a line where it is to."""
    assert process.stdin
    assert process.stdout
    if said:
        process.stdin.write(said)
        process.stdin.flush()
    return process.stdout.readline()


@pytest.fixture
def without_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "try_lock", lambda *_, **__: None)
    monkeypatch.setattr(hold, "STALE_SECONDS", 1.5)
    monkeypatch.setattr(hold, "POLL_SECONDS", 0.1)


def test_a_living_run_is_refused_and_a_dead_one_is_replaced_at_once(
    tmp_path: Path, other: Start
) -> None:
    """The claim was a file that nobody held: a second run replaced it."""
    with other("locks") as process:
        for run in (A, B):
            with pytest.raises(FolderHeldError, match=f"in use: run {A} on"):
                Hold(tmp_path, run, pytest.fail)
        assert hold.living(tmp_path).startswith(f"run {A} on")
        stop(process)  # it lives, and may go on at any time
        with pytest.raises(FolderHeldError):
            Hold(tmp_path, B, pytest.fail)
        process.kill()
    assert hold.living(tmp_path) == ""
    held = Hold(tmp_path, B, pytest.fail)
    held.claim(B)
    assert lineage.said(tmp_path / f"iter_0000003.{A}.partial") == A
    held.release()
    assert not (tmp_path / hold.LOCK).exists()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.usefixtures("without_locks")
def test_a_run_that_slept_while_another_took_over_saves_nothing(
    tmp_path: Path, other: Start, ends: bool
) -> None:
    """It would sign, or overwrite, what is the other's. Or the other has already ended."""
    with other("none") as process:
        with pytest.raises(FolderHeldError, match=f"in use: run {A} on"):  # its heartbeat is seen
            Hold(tmp_path, B, lambda _: None)
        stop(process)
        said: list[str] = []
        held = Hold(tmp_path, B, said.append)
        assert "waiting 1.5 s at most: run aaaaaaaa on" in said[0]
        mine = held.claim(B)
        distributed(folders.partial(tmp_path, 3, mine))
        folders.publish(tmp_path, 3, mine)
        if ends:
            held.release()
        before = (tmp_path / "iter_0000003/common.pt").stat()
        process.send_signal(signal.SIGCONT)
        told = {line(process), line(process, "save\n")}
        assert any(f"run {B} has taken {tmp_path}" in each for each in told)
        assert any(each.startswith("refused:") for each in told)
        line(process, "end\n")
        assert process.wait() == 0
    assert lineage.said(tmp_path / "iter_0000003") == B
    assert lineage.said(tmp_path / f"iter_0000003.{A}.partial") == A
    assert (tmp_path / "iter_0000003/common.pt").stat() == before
    assert (lineage.claimed(tmp_path) is None) == ends
    if not ends:
        held.release()


def test_a_folder_that_is_removed_is_claimed_again(tmp_path: Path) -> None:
    """Saves went on unsigned, without a word."""
    root, said = tmp_path / "save", list[str]()
    held = Hold(root, A, said.append)
    note = held.claim(A)
    for path in root.iterdir():
        path.unlink()
    root.rmdir()
    held.beat()
    held.beat()
    assert lineage.claimed(root) == note
    assert len(said) == 1
    assert f"{root} was removed while this run goes on" in said[0]
    with pytest.raises(FolderHeldError):
        Hold(root, B, pytest.fail)
    (root / lineage.NOTE).unlink()
    held.beat()
    assert lineage.claimed(root) == note
    held.release()
    assert [*root.iterdir()] == []


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 4000, b"\xff", b'{"run": 3}'])
def test_a_lock_file_that_says_nothing_is_taken(tmp_path: Path, content: bytes) -> None:
    (tmp_path / hold.LOCK).write_bytes(content)
    assert hold.living(tmp_path) == ""
    Hold(tmp_path, A, pytest.fail).release()


def test_a_dead_runs_lock_file_that_may_not_be_written_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's went on to say that it was that one's, and the run was told as taken over."""
    Hold(tmp_path, A, pytest.fail)  # which isn't released
    made = hold._open

    def opened(path: Path) -> int:
        return os.open(path, os.O_RDONLY) if path.exists() else made(path)

    monkeypatch.setattr(hold, "_open", opened)
    monkeypatch.setattr(files, "try_lock", lambda *_, **__: True)  # its process has ended
    held = Hold(tmp_path, B, pytest.fail)
    held.claim(B)
    held.beat()
    assert hold._read(held.handle) == held.me
    held.release()
    assert [*tmp_path.iterdir()] == []


def test_a_run_that_slept_within_a_heartbeat_sees_that_another_came_and_went(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had looked at the lock file's content before, and made the folder its own again."""
    first = Hold(tmp_path, A, pytest.fail)
    first.claim(A)
    monkeypatch.setattr(files, "try_lock", lambda *_, **__: True)
    look = hold._is_at

    def slept(handle: int, path: Path) -> bool:
        monkeypatch.setattr(hold, "_is_at", look)
        other = Hold(tmp_path, B, pytest.fail)
        other.claim(B)
        other.release()
        return look(handle, path)

    monkeypatch.setattr(hold, "_is_at", slept)
    with pytest.raises(FolderHeldError, match=f"run {B} has taken"):
        first.beat()


def test_a_lock_file_that_is_a_pipe_or_a_link_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / hold.LOCK)
    for look in (hold.living, lambda root: Hold(root, A, pytest.fail)):
        with pytest.raises(OSError, match="no file of ours"):
            look(tmp_path)
