"""Detects a run that is silent for too long, reports where its ranks are, and may end it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.words import CONCLUSION, REPORT, REPORTS, SAYS, compiling
from launcher.base import files
from launcher.runs.follow.listener import Listener
from launcher.runs.plan.job import ConnectionLost, Job
from launcher.runs.records import owner, record
from launcher.runs.runfile import config

START_SECONDS = 120.0
"""How long a run has at least to its first output: packages are read from a cold disk."""

COMPILE_SECONDS = 900.0
"""And while our program compiles: 58 s for a model of 1.2 billion parameters, beside an H100."""

END_SECONDS = 15
"""How long a run that is ended has to do so by itself: ranks that hang won't."""


@dataclass
class Silence:
    """Since when a run has written nothing of its own. It is due once, until the run goes on."""

    timeout: float
    since: float
    begun: bool = False
    told: bool = False
    compiles: bool = False

    def came(self, data: bytes, now: float) -> None:
        """Output came at `now`, in seconds of any clock."""
        before = SAYS.encode(), b"all-reduce of "  # of ranks that have still to import Megatron
        runners = all(line.startswith(before) for line in data.splitlines() if line)
        if runners and (self.told or not self.begun):  # a warning before the program's start
            return
        self.since, self.begun, self.told = now, True, False
        self.compiles = compiling(data, self.compiles)

    def left(self, now: float) -> float | None:
        """Seconds from `now` until it is due, 0 where it is; None where it has been reported."""
        least = COMPILE_SECONDS if self.compiles else 0.0 if self.begun else START_SECONDS
        return None if self.told else max(0.0, self.since + max(self.timeout, least) - now)


@dataclass(eq=False)
class SilenceWatch:
    """Listens to a job's output, and looks where its ranks are when none comes.

    `wanted` is the run file's section; `folder` is the run's, for stacks and flight records.
    `verdict` is what was found where the run was ended for it, else "".
    """

    job: Job
    wanted: config.Watchdog
    folder: Path
    tell: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    over: bool = False
    verdict: str = ""

    def __post_init__(self) -> None:
        self.silence = Silence(float(self.wanted.timeout), self.clock())
        self.changed = threading.Condition()

    def __enter__(self) -> SilenceWatch:
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self.over = True
            self.changed.notify()

    def add(self, data: bytes, is_error: bool) -> None:
        """Take a piece of the output: the run goes on."""
        before = self.silence.begun, self.silence.told, self.silence.compiles
        self.silence.came(data, self.clock())
        now = self.silence.begun, self.silence.told, self.silence.compiles
        if before != now:  # it is due at another time
            with self.changed:
                self.changed.notify()

    def _watch(self) -> None:
        while True:
            with self.changed:
                left = self.silence.left(self.clock())
                if not self.over and left != 0:
                    self.changed.wait(left)
                    continue
            if self.over:
                return
            try:
                self.bark()
            except ConnectionLost:  # the run may go on meanwhile
                self.silence.since = self.clock()
            else:
                self.silence.told = True

    def bark(self) -> None:
        """Report who waits for whom, keep the stacks, and end the run where that is wanted."""
        if owner.asked_to_stop(self.job.run):  # it saves, and is given its time for that
            return
        silent = f"no output for {self.clock() - self.silence.since:.0f} s"
        found = self.job.diagnose()
        if self.over or self.job.ended() is not None:
            return
        if not found:
            self.tell(f"{silent}, and its ranks can't be asked where they are")
        else:
            self.tell(f"{silent}: {conclusion(found)}")
            if kept := write_report(self.folder, found):
                self.tell(f"every rank's stack is in {kept}")
        if self.wanted.action == "end":
            self._end(conclusion(found) if found else "")
        else:
            self.tell(f"to end it: launcher stop {self.job.run}")

    def _end(self, why: str) -> None:
        self.verdict = f"stalled, {why}" if why else "stalled"
        self.tell("ending it, as watchdog.action says")
        self.job.stop(END_SECONDS)


@contextmanager
def watching(
    job: Job, folder: Path, tell: Callable[[str], None]
) -> Iterator[Sequence[SilenceWatch]]:
    """The watchdog that the run's record asks for, if it does."""
    wanted = record.find(job.run).asked().config.watchdog
    if not wanted.timeout:
        yield ()
        return
    with SilenceWatch(job, wanted, folder, tell) as dog:
        yield (dog,)


def report(files: Mapping[str, bytes]) -> str:
    """What a report says, line by line."""
    return files.get(REPORT, b"").decode(errors="replace")


def conclusion(files: Mapping[str, bytes]) -> str:
    """What it says in the end."""
    found = [line for line in report(files).splitlines() if line.startswith(CONCLUSION)]
    return found[-1].removeprefix(CONCLUSION) if found else "the report is empty"


def write_report(folder: Path, found: Mapping[str, bytes]) -> Path | None:
    """Keep a report in a new folder of the run's; None where it can't be written."""
    number = 1 + len([*folder.glob(f"{REPORTS}*")])
    at = folder / f"{REPORTS}{number}"
    try:
        at.mkdir(parents=True, mode=0o700)
        for name, content in found.items():
            files.write(at / name, content, 0o600)
    except OSError:
        return None
    return at


def verdict(listeners: Sequence[Listener]) -> str:
    """Why a watchdog among the listeners has ended the run, "" where none has."""
    found = [one.verdict for one in listeners if isinstance(one, SilenceWatch)]
    return next(filter(None, found), "")
