"""The watchdog: when it looks, what it tells and keeps, and what it ends."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.words import CONCLUSION, REPORT, link
from launcher.runs.follow import watchdog
from launcher.runs.follow.watchdog import COMPILE_SECONDS, START_SECONDS, Silence, SilenceWatch
from launcher.runs.plan.job import ConnectionLost, ExitStatus
from launcher.runs.records import owner, record
from launcher.runs.records.ending import Ending, Outcome, describe
from launcher.runs.runfile import config
from tests.e2e.site import until
from tests.runs.conftest import RUN, FakeJob

FOUND = {
    REPORT: f"rank 0 waits in barrier\n{CONCLUSION}rank 1 isn't in a collective\n".encode(),
    "rank-1.stack": b"Thread",
}
TOLD = "no output for 5 s: rank 1 isn't in a collective"


@dataclass
class Answering(FakeJob):
    """A run that answers with `found`, once for each of them, or doesn't."""

    found: list[Any] = field(default_factory=lambda: [FOUND])

    def diagnose(self) -> dict[str, bytes]:
        self.calls.append("diagnose")
        answer = self.found.pop(0) if self.found else {}
        if isinstance(answer, Exception):
            raise answer
        return answer


@dataclass
class Site:
    """A watchdog over a job, with a clock that a test sets."""

    folder: Path
    job: Answering = field(default_factory=Answering)
    told: list[str] = field(default_factory=list)
    now: float = 0.0

    def dog(self, action: str = "keep", timeout: int = 5) -> SilenceWatch:
        wanted = config.Watchdog(timeout=timeout, action=action)
        job: Any = self.job
        return SilenceWatch(job, wanted, self.folder, self.told.append, lambda: self.now)

    def barked(self, action: str = "keep") -> SilenceWatch:
        dog = self.dog(action)
        self.now = 5.0
        dog.bark()
        return dog


@pytest.fixture
def site(kept: Path) -> Site:
    return Site(kept)


def test_a_start_takes_longer_and_what_was_told_is_not_told_again() -> None:
    silence = Silence(3.0, since=0.0)
    assert silence.left(0.0) == START_SECONDS
    silence.came(b"runner: warning: 4 ranks share 2 CPUs\n", 1.0)  # the program hasn't begun
    silence.came(link(1, 2, "CPU", 0.2).encode() + b"\n", 1.0)  # its ranks import Megatron now
    assert silence.left(1.0) == START_SECONDS - 1
    silence.came(b"x", 1.0)
    assert silence.left(1.0) == 3.0
    silence.came(b"fast: compiled\ncompiling the step: the first\n", 1.0)
    silence.came(b"W1125: not enough SMs\n", 2.0)
    assert silence.left(2.0) == COMPILE_SECONDS
    silence.came(b"compiled the step in 40 s\n", 42.0)
    assert silence.left(42.0) == 3.0
    assert Silence(1e4, since=0.0).left(0.0) == 1e4
    silence = Silence(5.0, since=0.0, begun=True, told=True)
    silence.came(b"runner: rank 0 waits in barrier\nrunner: in short: it hangs\n", 6.0)
    assert silence.left(1e6) is None
    silence.came(b"runner: rank 0 waits\niteration 7\n", 7.0)  # until the run goes on
    assert silence.left(7.0) == 5.0


@given(st.lists(st.tuples(st.floats(0, 100), st.binary(max_size=8)), max_size=20))
def test_it_is_never_due_before_its_time(outputs: list[tuple[float, bytes]]) -> None:
    silence, now = Silence(10.0, since=0.0, begun=True), 0.0
    for pause, data in outputs:
        assert (silence.left(now + pause) == 0.0) is (pause >= 10.0)
        now += pause
        silence.came(data, now)


def test_stacks_that_cannot_be_kept_are_told_all_the_same(site: Site) -> None:
    shutil.rmtree(site.folder)
    site.folder.write_text("no folder")
    dog = site.barked()
    assert site.told == [TOLD, f"to end it: launcher stop {RUN}"]
    assert (dog.verdict, site.job.calls) == ("", ["diagnose"])


def test_a_run_whose_ranks_cannot_be_asked_is_ended_where_told_to(site: Site) -> None:
    site.job.found = [{}]
    dog = site.barked("end")
    assert site.told[0] == "no output for 5 s, and its ranks can't be asked where they are"
    assert (dog.verdict, site.job.calls[-1]) == ("stalled", "stop 15")


def test_a_run_that_ended_meanwhile_is_not_told_of(site: Site) -> None:
    site.job.over = True
    assert site.barked("end").verdict == ""
    assert site.told == []
    site.job.over, site.job.calls = False, []
    owner.ask_to_stop(RUN)  # it has its time for that
    site.barked("end")
    assert (site.told, site.job.calls) == ([], [])


def test_the_thread_looks_once_in_time_and_again_when_the_run_went_on(site: Site) -> None:
    before = threading.active_count()
    site.job.found = [FOUND, ConnectionLost("gone"), FOUND]
    with site.dog() as dog:
        site.now = 4.9
        dog.add(b"first\n", False)
        site.now = 9.8
        dog.add(b"second\n", False)
        time.sleep(0.3)
        assert site.job.calls == []
        site.now = 20.0
        with dog.changed:  # its own clock would have woken it
            dog.changed.notify()
        until(lambda: len(site.told) == 3)
        time.sleep(0.3)
        dog.add(b"runner: in short: it hangs\n", True)
        time.sleep(0.3)
        assert site.job.calls == ["diagnose"]
        dog.add(b"third\n", False)
        site.now = 1e3
        with dog.changed:
            dog.changed.notify()
        until(lambda: dog.silence.since == 1e3)  # a lost engine is asked again later
        assert len(site.told) == 3
        site.now = 2e3
        with dog.changed:
            dog.changed.notify()
        until(lambda: len(site.told) == 6)
    until(lambda: threading.active_count() == before)


def test_none_watches_where_it_is_turned_off(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    for timeout, watching in ((0, 0), (7, 1)):
        wanted = config.Watchdog(timeout=timeout)
        kept = SimpleNamespace(
            asked=lambda w=wanted: SimpleNamespace(config=SimpleNamespace(watchdog=w))
        )
        monkeypatch.setattr(record, "find", lambda run, kept=kept: kept)
        job: Any = site.job
        with watchdog.watching(job, site.folder, site.told.append) as dogs:
            assert len(dogs) == watching


STALLED = "stalled, rank 1 isn't in a collective"
ASKED = "runner: SIGTERM: asked 2 ranks to stop, waiting 600 s\n"
KILLED = f"{ASKED}runner: rank 0 was killed by signal 15 (SIGTERM), exit code 143\n"


@pytest.mark.parametrize(
    ("code", "asked", "tail", "outcome", "told"),
    [
        (143, False, KILLED, Outcome.FAILED, f"run r failed, exit code 143: {STALLED}"),
        (137, False, ASKED, Outcome.FAILED, f"run r failed, exit code 137: {STALLED}"),
        (0, False, "runner: stopped: ", Outcome.FAILED, f"run r failed, exit code 137: {STALLED}"),
        (0, False, "\nfinished after iteration 9", Outcome.FINISHED, None),
        (143, True, KILLED, Outcome.STOPPED, None),
    ],
)
def test_how_a_run_is_told_that_was_ended_for_it(
    code: int, asked: bool, tail: str, outcome: Outcome, told: str | None
) -> None:
    ending = Ending(ExitStatus(code), asked, tail, STALLED)
    assert ending.outcome is outcome
    assert ending.may_restart is (outcome is Outcome.FAILED)
    if told:
        assert describe(ending, "r", None, "")[0] == told
        assert ending.code != 0
