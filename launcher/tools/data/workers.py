"""Runs a function over pieces in processes, and returns results in order.

Each process has one piece at a time, so memory is bounded by their number. A process ends with the
one that started it, however that ends: the kernel kills it.
"""

from __future__ import annotations

import ctypes
import io
import multiprocessing
import os
import pickle
import signal
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeAlias, TypeVar

from launcher.tools.data.faults import DataError

Piece = TypeVar("Piece")
Result = TypeVar("Result")
Pipe: TypeAlias = io.BufferedRWPair

GROWTH = 64 << 20
"""Bytes by which a process may grow until another takes its place: tokenizers keep the words that
they have met."""
ENDED = (OSError, EOFError, pickle.UnpicklingError)
"""What a pipe raises when its other end is closed, maybe in the middle of an object."""
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MOST = 8
"""Workers where nobody says how many: one process reads and writes for all of them."""


def usual() -> int:
    """As many workers as CPUs that this process may use, up to MOST."""
    return min(len(os.sched_getaffinity(0)), MOST)


@dataclass(frozen=True)
class Worker:
    """A process, and our end of its pipe."""

    process: BaseProcess
    pipe: Pipe

    def end(self) -> None:
        """Kill the process, which may be a stopped one; what it wasn't sent yet is lost."""
        self.process.kill()
        with suppress(OSError):
            self.pipe.close()
        self.process.join()


class Workers(Generic[Piece, Result]):
    """At most `count` processes; each is made, by a fork, when there is a piece for it."""

    def __init__(self, work: Callable[[Piece], Result], count: int) -> None:
        self.work = work
        self.count = count
        self.workers: dict[int, Worker] = {}

    def map(self, pieces: Iterable[Piece]) -> Iterator[Result]:
        """The results, in order.

        Raises DataError where a process was killed, and what `work` raises; of that only the text,
        in a DataError, where it can't be sent or is no Exception.
        """
        busy: deque[int] = deque()
        try:
            for number, piece in enumerate(pieces):
                done = [self._receive(busy.popleft())] if len(busy) == self.count else []
                at = number % self.count
                if at not in self.workers:
                    self.workers[at] = self._start()
                busy.append(at)
                self._send(at, piece)
                yield from done  # all of them work while it is written and the next is read
            while busy:
                yield self._receive(busy.popleft())
        finally:
            for worker in self.workers.values():
                worker.process.kill()
            for worker in self.workers.values():
                worker.end()

    def _start(self) -> Worker:
        ours, theirs = map(_pipe, socket.socketpair())
        foreign = [ours, *(worker.pipe for worker in self.workers.values())]
        process = multiprocessing.get_context("fork").Process(
            target=_run, args=(self.work, theirs, foreign), daemon=True
        )
        process.start()
        theirs.close()
        return Worker(process, ours)

    def _send(self, at: int, piece: Piece) -> None:
        try:
            _put(piece, self.workers[at].pipe)
        except OSError:
            raise self._lost(at) from None

    def _receive(self, at: int) -> Result:
        try:
            result, full = pickle.load(self.workers[at].pipe)  # noqa: S301  # our own fork's
        except ENDED:
            raise self._lost(at) from None
        if full:
            self.workers.pop(at).end()
        if isinstance(result, Exception):
            raise result
        return result  # type: ignore[no-any-return]

    def _lost(self, at: int) -> DataError:
        process = self.workers[at].process
        process.join(1)
        said = f"a worker ended with {process.exitcode}"
        if process.exitcode != -signal.SIGKILL:
            return DataError(said)
        return DataError(f"{said}: was there too little memory?", "--workers 1 takes the least.")


def _pipe(end: socket.socket) -> Pipe:
    with end:
        return end.makefile("rwb")


def _put(what: object, pipe: Pipe) -> None:
    """As multiprocessing's connections do, without their copies: half the time of a large piece."""
    pickle.dump(what, pipe, pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _run(work: Callable[[Any], Any], pipe: Pipe, foreign: list[Pipe]) -> None:
    """A worker's life: pieces in, results out, until the pipe is closed or memory has grown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent gets the signal, and ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # what that one does then is not for its workers
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # stopped or busy, it reads no pipe
    for other in foreign:
        other.close()
    first = 0
    while True:
        try:
            piece = pickle.load(pipe)  # noqa: S301
        except ENDED:
            return
        try:
            result = work(piece)
        except BaseException as error:  # PyO3's panics are no Exception
            result = _sendable(error)
        del piece
        first = first or _resident()
        full = _resident() - first > GROWTH
        try:
            _put((result, full), pipe)
        except OSError:
            return
        if full:
            return


def _sendable(error: BaseException) -> Exception:
    """The error, or what it says where it would end the other process or can't be read there."""
    with suppress(Exception):
        if isinstance(error, Exception) and pickle.loads(pickle.dumps(error)):  # noqa: S301
            return error
    return DataError(f"a worker failed: {type(error).__name__}: {error}")


def _resident() -> int:
    """Bytes of memory that this process has in use; 0 where the system doesn't say."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
