"""Follows a run to its end: passes on output, forwards stop requests, restarts it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    closing,
    contextmanager,
    nullcontext,
    suppress,
)
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TYPE_CHECKING

from launcher.agent.ranks.signals import SignalListener
from launcher.base.errors import EngineError, UnfollowedError
from launcher.base.names import LABEL
from launcher.base.screen import duration
from launcher.runs.follow import find, live
from launcher.runs.follow.listener import Listener, Listening, nobody
from launcher.runs.follow.live import LostTerminal, OutputDetail, screened, tell, to_nowhere, write
from launcher.runs.plan.job import KILLED, Backend, ConnectionLost, EndCause, ExitStatus, Job
from launcher.runs.plan.plan import AFTER_GRACE
from launcher.runs.records import owner

if TYPE_CHECKING:
    from launcher.agent.checkpoints.folders import CheckpointFolder
    from launcher.runs.records.ending import Ending

SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEPT_OUTPUT = 1 << 16
NOTED_SECONDS = 5.0
"""How long a launcher that removes a run has to note how that ended."""

ENDS_SECONDS = 30.0
"""How long a run that nobody follows may take to end once it was stopped."""

RECONNECT_SECONDS = 120.0
RETRY_SECONDS = 0.5
REMIND_SECONDS = 30.0
HEARD_SECONDS = 0.5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0

Starter = Callable[[int], Job]
"""Starts a run's attempt, 0 the first."""


def supervise(
    chosen: Backend,
    start: Starter,
    *,
    restarts: int = 0,
    job: Job | None = None,
    listening: Listening = nobody,
    guest: bool = False,
    shown: OutputDetail = OutputDetail.USUAL,
) -> Ending:
    """Carry a run to its end, starting it again up to `restarts` times where it failed.

    `job` is a run that goes on already. Until a container has started, SIGINT and SIGTERM wait,
    so that none is left half-made; afterwards the first asks the run to stop and the second ends
    it at once. Nothing of the run is left but its files. Where another launcher follows it, that
    one starts it again and removes it. A `guest` only looks on: a signal ends nothing but that.
    """
    stopper = Stopper()
    with nullcontext() if guest else stopper.hearing(), screened(shown), ExitStack() as held:
        job = stopper.take(job) if job else stopper.started(start, 0)
        # What judges it is read as late as that: the run begins the sooner.
        from launcher.runs.follow import guard
        from launcher.runs.records import ending

        mine = not guest and held.enter_context(owner.following(job.run))
        for attempt in count(attempt_of(job) + 1):
            with listening(job) if mine else nobody(job) as listeners:
                found = _to_its_end(chosen, job, stopper, mine=mine, listeners=listeners)
            stopper.let_go()
            back = guard.settle(listeners, found) if mine else ""
            saved = _tell_ending(found, job, seen=chosen.shares_files)
            if mine:
                ending.write_ending(job.run, attempt - 1, found, stopper.names, saved)
            again = attempt - guard.rewinds(job.run)
            if not back and (again > restarts or not (mine and found.may_restart)):
                break
            tell(back or f"starting it again: {again} of {restarts} times")
            stopped = stopper.wait(min(FIRST_PAUSE * 2 ** max(again - 1, 0), LONGEST_PAUSE))
            if stopped or owner.asked_to_stop(job.run):
                tell("stopped before it was restarted")
                break
            job = stopper.started(start, attempt)
        return found


def attempt_of(job: Job) -> int:
    """How often the run had been started before."""
    return int(job.labels.get(f"{LABEL}attempt", 0))


def _to_its_end(
    chosen: Backend, job: Job, stopper: Stopper, *, mine: bool, listeners: Sequence[Listener]
) -> Ending:
    """Follow the job; where it is `mine`, remove it, but for a lost engine or terminal."""
    from launcher.runs.follow import compact, guard, watchdog
    from launcher.runs.records.ending import Ending

    follower = Follower(chosen, job, stopper, mine, [*listeners])
    live.screen.edit = compact.editor(job.run, live.screen, os.environ)
    try:
        ended = follower.follow()
        for is_error in (False, True):
            follower.write(b"", is_error)  # what of a line hasn't ended
    except (EngineError, LostTerminal, BrokenPipeError):
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise UnfollowedError(
            f"run {job.run} goes on, but can't be followed: {where}{error.strerror or error}",
            f"Follow it again: launcher attach {job.run}",
        ) from error
    except BaseException:
        if mine:
            follower.job.remove()
        raise
    if mine:
        follower.job.remove()
    elif ended.cause is EndCause.REMOVED:
        ended = _noted(job) or ended
    asked = bool(stopper.asked) or owner.asked_to_stop(job.run)
    why = watchdog.verdict(listeners), guard.verdict(listeners)
    diverged = "" if ended.code else guard.diverged(listeners, follower.tail.text)
    return Ending(ended, asked, follower.tail.text, *why, diverged)


def _noted(job: Job) -> ExitStatus | None:
    """How a job ended that another launcher has followed and removed, by the run's record."""
    from launcher.runs.records import recorded_runs

    until = time.monotonic() + NOTED_SECONDS
    while (
        told := recorded_runs.ended(job.run, attempt_of(job))
    ) is None and time.monotonic() < until:
        time.sleep(min(RETRY_SECONDS, 0.2))
    return told


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


@dataclass
class Follower:
    """Passes a job's output on, each byte once, even where the engine goes away in between."""

    chosen: Backend
    job: Job
    stopper: Stopper
    mine: bool
    listeners: list[Listener] = field(default_factory=list)
    tail: Tail = field(default_factory=Tail)
    passed: Counter[tuple[bool, int]] = field(default_factory=Counter)

    def follow(self) -> ExitStatus:
        """Pass on the output until the end. Raises EngineError where the engine stays away."""
        cut_short = False
        while True:
            try:
                self._pass_on()
                ended = self.job.wait()
                return ExitStatus(ended.code, EndCause.ENGINE) if cut_short else ended
            except ConnectionLost as error:
                found = self._reconnect(error.reason)
            if found is None:
                return ExitStatus(KILLED, EndCause.REMOVED)
            self.job, cut_short = found
            if not cut_short:
                self.stopper.take(self.job)

    def _pass_on(self) -> None:
        """Write what comes; after a loss the output comes from its beginning again."""
        skip = self.passed.copy()
        for is_error, data, node in self.job.output():
            stream = is_error, node
            known = min(skip[stream], len(data))
            skip[stream] -= known
            if (new := data[known:]) or not data:  # an empty piece says that the run goes on
                self._take(new, is_error)
                self.passed[stream] += len(new)

    def _take(self, data: bytes, is_error: bool) -> None:
        """Pass it on first: who listens mustn't hold it up."""
        self.write(data, is_error)
        self.tail.add(data)
        for listener in [*self.listeners]:
            try:
                listener.add(data, is_error)
            except Exception as error:  # whatever is wrong with it, the run goes on
                self.listeners.remove(listener)
                name = type(listener).__name__.lower()
                tell(f"the {name} has ended, the run goes on: {type(error).__name__}: {error}")

    def write(self, data: bytes, is_error: bool) -> None:
        """Pass it on; a closed pipe asks the run to stop, which saves and ends with no reader.

        Ctrl-C ends `| tee` too, and what the run says of its saving is then for nobody.
        """
        try:
            write(data, is_error)
        except BrokenPipeError:
            if not self.mine:
                raise
            to_nowhere(sys.stderr if is_error else sys.stdout)
            self.stopper.nobody_reads()

    def _reconnect(self, reason: str) -> tuple[Job, bool] | None:
        """The same run on the engine that has come back, and whether it had ended by then.

        None where it has gone. Raises EngineError where the engine stays away.
        """
        tell(f"the engine was lost ({reason}); waiting up to {duration(RECONNECT_SECONDS)} for it")
        until = time.monotonic() + RECONNECT_SECONDS
        while time.monotonic() < until and self.stopper.asked < 2:
            time.sleep(RETRY_SECONDS)
            with suppress(EngineError):
                found = [job for job in self.chosen.jobs() if job.run == self.job.run]
                return (found[0], found[0].ended() is not None) if found else None
        raise EngineError(
            "the engine was lost",
            f"When the engine is back, look at the run: launcher attach {self.job.run}",
        )


def _tell_ending(found: Ending, job: Job, *, seen: bool) -> CheckpointFolder | None:
    """Print how the run ended; the newest checkpoint, where its files are `seen` from here."""
    from launcher.runs.records import ending

    saves, saved = job.labels.get(f"{LABEL}checkpoints") if seen else None, None
    try:
        saved = find.newest(job.labels) if saves else None
    except OSError as error:
        tell(f"can't look for checkpoints in {saves}: {error.strerror}")
        saves = None
    for line in ending.describe(found, job.run, saved, saves or ""):
        tell(line)
    return saved


class Stopper:
    """Hears signals: the first asks the run to end, the second ends it at once.

    The engine is asked from a thread of its own, and the user informed from it, so that the second
    is heard while an answer to the first is waited for.
    """

    def __init__(self) -> None:
        self.job: Job | None = None
        self.names = list[str]()
        self.unheard = False
        self.lock = threading.Lock()

    @property
    def asked(self) -> int:
        """How often it was."""
        return len(self.names)

    def hearing(self) -> AbstractContextManager[SignalListener]:
        """Hear SIGINT and SIGTERM."""
        return closing(SignalListener(SIGNALS, self))

    def started(self, start: Starter, attempt: int) -> Job:
        """The job of an attempt; a signal that came meanwhile is for that."""
        with _signals_held():
            job = start(attempt)
        with self.lock:
            self.job = job
            if self.unheard:
                self._ask(job)
        return job

    def take(self, job: Job) -> Job:
        """A job that goes on; it is asked again what an engine that was lost didn't hear."""
        with self.lock:
            self.job = job
            if self.asked:
                self._ask(job)
        return job

    def let_go(self) -> None:
        """The job has ended; the next one is for what comes now."""
        with self.lock:
            self.job = None

    def wait(self, seconds: float) -> bool:
        """Wait for that long, or until a stop is asked for; whether it was."""
        until = time.monotonic() + seconds
        while not self.asked and time.monotonic() < until:
            time.sleep(0.1)
        return bool(self.asked)

    def __call__(self, signum: int) -> None:
        with self.lock:
            self.names.append(signal.Signals(signum).name)
            self.unheard = self.job is None
            if self.job:
                self._ask(self.job)

    def nobody_reads(self) -> None:
        """Ask the run to end as a signal does, where none did.

        Ctrl-C ends the reader, too, whose end may be seen before the signal is heard.
        """
        if not self.wait(HEARD_SECONDS):
            self(signal.SIGPIPE)

    def _ask(self, job: Job) -> None:
        owner.ask_to_stop(job.run)
        if self.asked > 1:
            _in_thread(job.kill)
            return
        _in_thread(lambda: ask(job, "the run", grace_of(job), " Ctrl-C again ends it at once."))


def grace_of(job: Job) -> int:
    """The seconds that a job has between the request to stop and the kill."""
    return int(job.labels.get(f"{LABEL}stop_grace", AFTER_GRACE))


def stop(job: Job, *, now: bool = False, grace: int | None = None) -> None:
    """Stop a run from outside: asked first, killed `grace` seconds later, or `now`.

    Who follows it sees the end and removes it; one that nobody follows is left for `attach`. One
    that has ended before is removed.
    """
    if (before := job.ended()) is not None:
        with owner.following(job.run) as mine:
            if mine:
                _note(job, before)
        job.remove()
        tell(f"run {job.run} had ended; removed")
        return
    owner.ask_to_stop(job.run)
    if now:
        job.kill()
    else:
        ask(job, f"run {job.run}", grace_of(job) if grace is None else grace)
    with owner.following(job.run) as mine:
        if mine and (left := _soon_ended(job)):
            _note(job, left)
            if left.cause is not EndCause.REMOVED:
                tell(f"to see its log and remove it: launcher attach {job.run}")


def _soon_ended(job: Job) -> ExitStatus | None:
    """How a job ended that was stopped; None where it goes on all the same."""
    until = time.monotonic() + ENDS_SECONDS
    while (left := job.ended()) is None and time.monotonic() < until:
        time.sleep(RETRY_SECONDS)
    return left


def _note(job: Job, ended: ExitStatus) -> None:
    """Keep how a run ended that nobody followed, as who follows it would."""
    from launcher.runs.records import ending

    tail, saved = Tail(), None
    with suppress(ConnectionLost, OSError):
        for _, data, _ in job.output(follow=False):
            tail.add(data)
    if job.labels.get(f"{LABEL}checkpoints"):
        with suppress(OSError):
            saved = find.newest(job.labels)
    asked = owner.asked_to_stop(job.run)
    if asked and ended.cause is EndCause.REMOVED:  # which is how some backends stop
        ended = replace(ended, cause=EndCause.ITSELF)
    found = ending.Ending(ended, asked, tail.text)
    ending.write_ending(job.run, attempt_of(job), found, [], saved)


def ask(job: Job, name: str, grace: int, more: str = "") -> None:
    """Ask a job to stop, which gets killed after `grace` seconds, and print what is waited for."""
    folder = job.labels.get(f"{LABEL}checkpoints")
    saving = f" and save to {folder}" if folder else ""
    until = time.monotonic() + min(grace, grace_of(job) - AFTER_GRACE)
    tell(f"asked {name} to stop{saving}; it has {duration(until - time.monotonic())}.{more}")
    asking = _in_thread(lambda: job.stop(grace))
    asking.join(REMIND_SECONDS)
    while asking.is_alive():
        left = duration(until - time.monotonic())
        tell(f"waiting for {name} to {'save' if folder else 'end'}: {left} left")
        asking.join(REMIND_SECONDS)


def _in_thread(call: Callable[[], object]) -> threading.Thread:
    def quietly() -> None:
        with suppress(ConnectionLost, OSError):
            call()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    return thread


@contextmanager
def _signals_held() -> Iterator[None]:
    """Keep SIGINT and SIGTERM from what is started meanwhile."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
