"""Locks a checkpoint folder for one run, as long as the process that started its ranks lives.

A run locks `LOCK` in the folder: the kernel takes the lock from a process that ends. Some network
file systems keep locks to one machine, or have none. So the holder also sets the file's time of
change again and again, and the file server's own clock has its age.
Standard library only: the launcher looks from outside, the runner holds.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.agent.checkpoints import lineage
from launcher.base import files, owned
from launcher.base.owned import kernel

LOCK = "launcher-run.lock"

BEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""After so long without a heartbeat a holder on another machine is taken for dead."""

POLL_SECONDS = 1.0
LONGEST = 1 << 12


class FolderHeldError(Exception):
    """Another run holds the folder; the text says which, and where it runs."""


@dataclass(frozen=True)
class Holder:
    """What the lock file says; `kernel` is the same in all containers of a running machine."""

    run: str
    host: str
    kernel: str
    token: str


def living(root: Path) -> str:
    """Which run holds `root`, in words; "" where none does. Raises `OSError`.

    A holder on another machine counts as alive until its heartbeat is `STALE_SECONDS` old.
    """
    try:
        handle = files.open_own(root / LOCK, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return ""
    with files.closing_handle(handle):
        locked = files.try_lock(handle)
        other = _read(handle)
        if locked is False:
            return _named(other)
        if other is None or _is_dead(other, locked):
            return ""
        age = _age(root, handle)
        return f"{_named(other)} (last heartbeat {age:.0f} s ago)" if age < STALE_SECONDS else ""


class Hold:
    """A folder that is held for a run: the lock, the heartbeat, and the claim (`lineage`) in it."""

    def __init__(self, root: Path, run: str, say: Callable[[str], None]) -> None:
        """Take the folder, which is made where it isn't there.

        It may wait `STALE_SECONDS` for a holder on another machine. Raises FolderHeldError, and
        `OSError`.
        """
        self.root = root
        self.say = say
        self.me = Holder(run, socket.gethostname(), kernel(), os.urandom(8).hex())
        self.note: lineage.LineageNote | None = None  # the claim, once it is made
        self.ended = threading.Event()
        self.thread: threading.Thread | None = None
        self.handle = self._take()

    def _take(self) -> int:
        self.root.mkdir(parents=True, exist_ok=True)
        while True:
            handle = _open(self.root / LOCK)
            try:
                self._await_other(handle)
                if _is_at(handle, self.root / LOCK):
                    self._write(handle)
                    if _read(handle) in (None, self.me):
                        return handle
                    os.unlink(self.root / LOCK)  # another user's, of a run that was killed
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _await_other(self, handle: int) -> None:
        """Return once the file's holder is dead; raises FolderHeldError where it lives."""
        locked = files.try_lock(handle)
        other = _read(handle)
        if locked is False:
            raise FolderHeldError(f"{self.root} is in use: {_named(other)} saves there")
        if other is None or _is_dead(other, locked):
            return
        before, said = os.fstat(handle).st_mtime_ns, False
        while _age(self.root, handle) < STALE_SECONDS:
            if not said:
                self.say(f"waiting {STALE_SECONDS:g} s at most: {_named(other)} may save there")
                said = True
            time.sleep(POLL_SECONDS)
            if _beat_of(self.root / LOCK, handle) != before:
                raise FolderHeldError(f"{self.root} is in use: {_named(other)} saves there")

    def _write(self, handle: int) -> None:
        with suppress(OSError):  # a full disk, or another user's file: the lock is held
            content = json.dumps(asdict(self.me)).encode()
            os.ftruncate(handle, 0)
            os.pwrite(handle, content, 0)
            os.fsync(handle)

    def claim(self, line: str, *, overwrite: bool = False) -> lineage.LineageNote:
        """Note in the folder that the run, of the `line`, saves there. Raises `OSError`."""
        self.note = lineage.claim(
            self.root, self.me.run, line, overwrite=overwrite, holder=self.me.token
        )
        return self.note

    def watch(self, lost: Callable[[str], None]) -> None:
        """Send heartbeats from now on; `lost` is called where another run takes the folder."""
        self.thread = threading.Thread(target=self._watch, args=(lost,), daemon=True)
        self.thread.start()

    def _watch(self, lost: Callable[[str], None]) -> None:
        while not self.ended.wait(BEAT_SECONDS):
            try:
                self.beat()
            except FolderHeldError as held:
                lost(str(held))
                return
            except OSError:  # such as a server that doesn't answer: the next one may succeed
                continue

    def beat(self) -> None:
        """Send a heartbeat; the folder is still held. Raises FolderHeldError, OSError."""
        # In this order: who takes the folder writes the file first, and removes it last.
        in_place = _is_at(self.handle, self.root / LOCK)
        there, inside = lineage.claimed(self.root), _read(self.handle)
        if self.note and there and there.holder != self.me.token:
            raise FolderHeldError(f"run {there.run} has taken {self.root}, which this run saves to")
        if inside and inside != self.me:
            raise FolderHeldError(
                f"run {inside.run} has taken {self.root}, which this run saves to"
            )
        if not in_place:
            self._take_again()
        elif there is None and self.note:
            lineage.put(self.root, self.note)
        os.utime(self.handle)

    def _take_again(self) -> None:
        handle = self._take()
        os.close(self.handle)
        self.handle = handle
        if self.note:
            lineage.put(self.root, self.note)
        self.say(
            f"warning: {self.root} was removed while this run goes on. The run made it again and "
            "saves there; the checkpoints that were in it are lost"
        )

    def release(self) -> None:
        """Let others have the folder, whose checkpoints say whose they are."""
        self.ended.set()
        if self.thread:
            self.thread.join()
        with suppress(OSError):  # a full disk: then the claim stays, which says the same
            claimed = lineage.claimed(self.root)
            if claimed and claimed.holder == self.me.token:
                lineage.settle(self.root)
        with suppress(OSError):
            known = _read(self.handle)
            if known == self.me and _is_at(self.handle, self.root / LOCK):
                owned.remove_file(self.root.absolute() / LOCK, self.root.absolute())
        os.close(self.handle)


def _open(path: Path) -> int:
    """The lock file, to be written where that is allowed."""
    try:
        return files.open_own(path, os.O_RDWR | os.O_CREAT, 0o644)
    except files.ForeignFileError:
        raise
    except PermissionError:  # another user's, of a run that was killed
        return files.open_own(path, os.O_RDONLY)


def _read(handle: int) -> Holder | None:
    try:
        told = json.loads(os.pread(handle, LONGEST, 0))
        return Holder(*(str(told[name])[:64] for name in ("run", "host", "kernel", "token")))
    except (ValueError, RecursionError, KeyError, TypeError):
        return None


def _named(other: Holder | None) -> str:
    return f"run {other.run} on {other.host}" if other else "another run"


def _is_dead(other: Holder, locked: bool | None) -> bool:
    """Whether a lock that could be taken shows that the file's holder has ended."""
    return bool(locked and other.kernel and other.kernel == kernel())


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _beat_of(path: Path, handle: int) -> int:
    """The time of the last heartbeat (ns); opening the file asks a file server anew."""
    with suppress(FileNotFoundError), open(files.open_own(path, os.O_RDONLY)) as fresh:
        return os.fstat(fresh.fileno()).st_mtime_ns
    return os.fstat(handle).st_mtime_ns


def _age(root: Path, handle: int) -> float:
    """How old the heartbeat is, in seconds, by the clock of the server that has the file."""
    try:
        with files.PendingFile(root / LOCK) as probe:
            now = os.fstat(probe.file.fileno()).st_mtime
    except OSError:  # where nothing may be written: by this machine's clock
        now = time.time()
    return now - _beat_of(root / LOCK, handle) / 1e9
