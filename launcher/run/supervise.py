"""Follows a run to its end: passes on its output, stops it when asked to, starts it again."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from launcher.backends import Backend, Cause, Ended, Job, Lost
from launcher.errors import EngineError
from launcher.run import ending
from launcher.run.ending import Ending
from launcher.run.image import LABEL
from launcher.run.plan import AFTER_GRACE
from launcher.train import folders

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEPT_OUTPUT = 1 << 16
RECONNECT_SECONDS = 120.0
LONGEST_PAUSE = 60.0

Starter = Callable[[int], Job]
"""Starts a run's attempt, 0 the first."""


def supervise(
    chosen: Backend, start: Starter, *, restarts: int = 0, job: Job | None = None
) -> Ending:
    """Carry a run to its end, starting it again up to `restarts` times where it failed.

    `job` is a run that goes on already. Until a container has started, SIGINT and SIGTERM wait,
    so that none is left half-made; afterwards the first asks the run to stop and the second ends
    it at once. Nothing of the run is left but its files.
    """
    stopper = Stopper()
    with stopper.installed():
        for attempt in range(restarts + 1):
            if job is None or attempt:
                with _signals_held():
                    job = stopper.job = start(attempt)
            stopper.job = job
            found = _to_its_end(chosen, job, stopper)
            _tell_ending(found, job)
            if not found.may_restart or attempt == restarts:
                break
            tell(f"starting it again: {attempt + 1} of {restarts} times")
            if stopper.wait(min(2.0**attempt, LONGEST_PAUSE)):
                break
        return found


def _to_its_end(chosen: Backend, job: Job, stopper: Stopper) -> Ending:
    """Follow the job, and remove it whatever happens, but for a lost engine or terminal."""
    follower = Follower(chosen, job, stopper)
    try:
        ended = follower.follow()
    except (EngineError, LostTerminal):
        raise
    except BaseException:
        follower.job.remove()
        raise
    follower.job.remove()
    return Ending(ended, bool(stopper.asked), follower.tail.text, follower.lost)


class LostTerminal(OSError):
    """The terminal has gone; unlike a closed pipe, that is no wish to end the run."""


@dataclass
class Tail:
    """The last output, of both streams as they came."""

    kept: bytearray = field(default_factory=bytearray)

    def add(self, data: bytes) -> None:
        self.kept += data
        if len(self.kept) > 2 * KEPT_OUTPUT:
            del self.kept[:-KEPT_OUTPUT]

    @property
    def text(self) -> str:
        return bytes(self.kept).decode(errors="replace")


class Follower:
    """Passes a job's output on, each byte once, even where the engine goes away in between."""

    def __init__(self, chosen: Backend, job: Job, stopper: Stopper) -> None:
        self.chosen = chosen
        self.job = job
        self.stopper = stopper
        self.tail = Tail()
        self.lost = False
        self.passed = {False: 0, True: 0}

    def follow(self) -> Ended:
        """Pass on the output until the end."""
        while True:
            try:
                self._pass_on()
                ended = self.job.wait()
                return Ended(ended.code, Cause.ENGINE) if self.lost and ended.code else ended
            except Lost as error:
                self.lost = True
                found = self._reconnect(str(error))
                if found is None:
                    return Ended(ending.KILLED, Cause.REMOVED)
                self.job = self.stopper.job = found

    def _pass_on(self) -> None:
        """Write what comes; after a loss the output comes from its beginning again."""
        skip = dict(self.passed)
        for is_error, data in self.job.output():
            known = min(skip[is_error], len(data))
            skip[is_error] -= known
            if new := data[known:]:
                self.tail.add(new)
                write(new, is_error)
                self.passed[is_error] += len(new)

    def _reconnect(self, reason: str) -> Job | None:
        """The same run on the engine that has come back; None where it has gone.

        Raises EngineError where the engine stays away.
        """
        tell(f"the engine was lost ({reason}); waiting for it")
        until = time.monotonic() + RECONNECT_SECONDS
        while time.monotonic() < until and self.stopper.asked < 2:
            try:
                found = [job for job in self.chosen.jobs() if job.run == self.job.run]
                return found[0] if found else None
            except (Lost, EngineError):
                time.sleep(0.5)
        raise EngineError(
            "the engine was lost",
            f"See what became of the run when it is back: python3 -m launcher attach "
            f"{self.job.run}",
        )


def write(data: bytes, is_error: bool) -> None:
    """Pass a piece of output on. Raises LostTerminal, and BrokenPipeError of a pipe."""
    out = sys.stderr.buffer if is_error else sys.stdout.buffer
    try:
        out.write(data)
        out.flush()
    except BrokenPipeError:
        raise  # nobody reads what the run says: it ends, as in any pipe
    except OSError as error:
        raise LostTerminal(*error.args) from error


def _tell_ending(found: Ending, job: Job) -> None:
    saves = job.labels.get(f"{LABEL}checkpoints")
    saved = folders.newest_complete(Path(saves)) if saves else None
    for line in ending.describe(found, job.run, saved, bool(saves)):
        tell(line)


class Stopper:
    """A signal handler: the first asks the run to end, the second ends it at once.

    The engine is asked from a thread, as the signal may interrupt another call to it.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.asked = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Handle SIGINT and SIGTERM with this."""
        previous = {signum: signal.signal(signum, self) for signum in SIGNALS}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def wait(self, seconds: float) -> bool:
        """Wait for that long, or until a stop is asked for; whether it was."""
        until = time.monotonic() + seconds
        while not self.asked and time.monotonic() < until:
            time.sleep(0.1)
        return bool(self.asked)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.asked += 1
        job = self.job
        if job is None:
            return
        if self.asked > 1:
            _in_thread(job.kill)
            return
        grace = grace_of(job)
        tell(f"asked the run to stop{_saving(job)}; it has {grace - AFTER_GRACE} s. "
             "Once more ends it at once.")  # fmt: skip
        _in_thread(lambda: job.stop(grace))


def grace_of(job: Job) -> int:
    """The seconds that a job has between the request to stop and the kill."""
    return int(job.labels.get(f"{LABEL}stop_grace", AFTER_GRACE))


def stop(job: Job, *, now: bool = False, grace: int | None = None) -> None:
    """Stop a run from outside: asked first, killed `grace` seconds later, or `now`.

    Who follows it sees the end and removes it; one that nobody follows is left for `attach`. One
    that has ended before is removed.
    """
    try:
        if job.ended() is not None:
            job.remove()
            tell(f"run {job.run} had ended; removed")
            return
        if now:
            job.kill()
            return
        seconds = grace_of(job) if grace is None else grace
        tell(f"asked run {job.run} to stop{_saving(job)}; it has {max(0, seconds - AFTER_GRACE)} s")
        job.stop(seconds)
    except Lost as error:
        raise EngineError(f"the engine was lost: {error}") from error


def _saving(job: Job) -> str:
    folder = job.labels.get(f"{LABEL}checkpoints")
    return f" and save to {folder}" if folder else ""


def _in_thread(call: Callable[[], object]) -> None:
    def quietly() -> None:
        with suppress(Lost):
            call()

    threading.Thread(target=quietly, daemon=True).start()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM waiting."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell(text: str) -> None:
    """A line of the launcher's own, on stderr."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)
