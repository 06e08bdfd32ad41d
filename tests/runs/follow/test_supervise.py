"""A run followed to its end, by jobs and engines made up for it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.agent.ranks import signals as caught
from launcher.base.errors import EngineError, UnfollowedError
from launcher.runs.follow import live, supervise
from launcher.runs.plan.job import ConnectionLost, EndCause, ExitStatus, OutputPiece
from launcher.runs.records import owner, record
from launcher.runs.records.ending import Outcome
from tests.e2e.site import until
from tests.runs.conftest import RUN, FakeJob


def engine(*jobs: FakeJob | Exception) -> Any:
    """An engine that has each of the jobs when it is asked once more, or fails; then none."""
    answers = iter(jobs)

    def found() -> list[FakeJob]:
        answer = next(answers, None)
        if isinstance(answer, Exception):
            raise answer
        return [answer] if answer else []

    return SimpleNamespace(jobs=found, shares_files=True)


def never(attempt: int) -> Any:
    raise AssertionError("started")


@pytest.fixture(autouse=True)
def _no_pauses(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(supervise, "LONGEST_PAUSE", 0.0)


def pieces(data: bytes, stream: tuple[bool, int], cuts: list[int]) -> list[OutputPiece]:
    """`data` in pieces that end at the cuts."""
    ends = sorted({min(cut, len(data)) for cut in cuts} | {len(data)})
    is_error, node = stream
    pairs = zip([0, *ends], ends, strict=False)
    return [OutputPiece(is_error, data[a:b], node) for a, b in pairs if a < b]


STREAMS = [(False, 0), (True, 0), (False, 1), (True, 1)]


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[list[bytes], list[FakeJob]]:
    """Two streams of two nodes each, and the jobs that give them: all but the last are cut.

    A later job has the same bytes of each stream in other pieces and in another order.
    """
    drawn = [draw(st.binary(max_size=20)) for _ in STREAMS]
    written = [bytes(n << 6 | byte & 63 for byte in data) for n, data in enumerate(drawn)]
    jobs = []
    for _ in range(draw(st.integers(1, 4))):
        cuts = st.lists(st.integers(0, 20), max_size=4)
        left = [pieces(*each, draw(cuts)) for each in zip(written, STREAMS, strict=True)]
        order = draw(st.permutations([n for n in range(4) for _ in left[n]]))
        mixed = [left[n].pop(0) for n in order]
        jobs.append(FakeJob(mixed, cut=draw(st.integers(0, len(mixed)))))
    jobs[-1].cut = None
    return written, jobs


@settings(deadline=None)
@given(cut_streams())
def test_each_byte_is_passed_on_once_however_often_the_engine_goes(
    drawn: tuple[list[bytes], list[FakeJob]],
) -> None:
    """Of several nodes, too, though their lines come in another order the second time."""
    written, jobs = drawn
    passed = {False: b"", True: b""}

    def write(data: bytes, is_error: bool) -> None:
        passed[is_error] += data

    follower = supervise.Follower(engine(*jobs[1:]), jobs[0], supervise.Stopper(), True)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervise, "write", write)
        patched.setattr(supervise, "tell", lambda text: None)
        assert follower.follow() == ExitStatus(0)
    for number, (is_error, _) in enumerate(STREAMS):
        assert bytes(byte for byte in passed[is_error] if byte >> 6 == number) == written[number]
    assert sum(map(len, passed.values())) == sum(map(len, written))


@settings(deadline=None)
@given(st.lists(st.binary(max_size=1 << 16), max_size=12))
def test_the_tail_is_the_end_of_the_output(written: list[bytes]) -> None:
    tail = supervise.Tail()
    for data in written:
        tail.add(data)
    whole = b"".join(written)
    assert whole.endswith(bytes(tail.kept))
    assert min(len(whole), supervise.KEPT_OUTPUT) <= len(tail.kept) <= 2 * supervise.KEPT_OUTPUT


def test_an_engine_that_comes_back_has_ended_the_run_or_removed_it() -> None:
    first, back = FakeJob(cut=0), FakeJob(end=ExitStatus(137), over=True)
    chosen = engine(ConnectionLost("away"), EngineError("away"), back)
    found = supervise.supervise(chosen, never, job=first)
    assert found.ended == ExitStatus(137, EndCause.ENGINE)
    assert (first.calls, back.calls) == ([], ["remove"])
    found = supervise.supervise(engine(), never, job=FakeJob(cut=0))
    assert found.ended == ExitStatus(137, EndCause.REMOVED)


def test_one_who_looks_on_hears_how_the_run_ended_from_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`attach` ended with 137, removed from outside, where the run was stopped with 0."""
    monkeypatch.setattr(supervise, "NOTED_SECONDS", 0.3)
    line = {"attempt": 0, "code": 0, "cause": "itself", "outcome": "stopped"}
    record.append(RUN, record.ENDINGS, {"attempt": 1, "code": 3, "cause": "itself"})
    assert supervise.supervise(engine(), never, job=FakeJob(cut=0), guest=True).code == 137
    record.append(RUN, record.ENDINGS, line)
    assert supervise.supervise(engine(), never, job=FakeJob(cut=0), guest=True).code == 0


def test_an_engine_that_stays_away_is_told_and_nothing_is_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "RECONNECT_SECONDS", 0.0)
    job = FakeJob(cut=0)
    with pytest.raises(EngineError, match="engine was lost") as caught:
        supervise.supervise(engine(), never, job=job)
    assert f"attach {RUN}" in caught.value.remedy
    assert job.calls == []
    job.ended = lambda: (_ for _ in ()).throw(ConnectionLost("away"))
    with pytest.raises(EngineError, match="the engine was lost: away"):
        supervise.stop(job)


def test_a_run_that_cannot_be_followed_goes_on_and_is_named() -> None:
    """An error of the launcher's own disk ended it with 2, and removed the run."""
    job = FakeJob(cut=0)
    job.output = lambda **_: (_ for _ in ()).throw(OSError(28, "No space left", "/full"))
    with pytest.raises(UnfollowedError, match=f"run {RUN} goes on.* /full: No space") as caught:
        supervise.supervise(engine(), never, job=job)
    assert (caught.value.exit_code, job.calls) == (123, [])
    assert f"attach {RUN}" in caught.value.remedy


def signals(*steps: tuple[int, Callable[[], object]]) -> None:
    """Send this process each signal, once what stands before it has happened."""

    def send() -> None:
        for signum, first in steps:
            until(first)
            os.kill(os.getpid(), signum)

    threading.Thread(target=send, daemon=True).start()


def ready() -> bool:
    """Whether the signals are handled by a supervisor."""
    return signal.getsignal(signal.SIGTERM) is caught._nothing


LABELS = {
    "megatron-launchpad.stop_grace": "610",
    "megatron-launchpad.checkpoints": "/no/such/folder",
}


def test_while_it_saves_what_is_left_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(supervise, "tell", told.append)
    monkeypatch.setattr(supervise, "REMIND_SECONDS", 0.01)
    job = FakeJob(labels=LABELS)
    job.stop = lambda grace: until(lambda: len(told) > 2)
    supervise.ask(job, "the run", 300)
    asked, *reminders = told
    assert asked == "asked the run to stop and save to /no/such/folder; it has 5 min."
    assert len(reminders) >= 2
    assert all(
        re.fullmatch(r"waiting for the run to save: [45][.0-9]* min left", one) for one in reminders
    )


def test_a_signal_during_the_start_is_heard_beside_other_threads() -> None:
    """The system gives it to whichever thread doesn't hold it back."""
    job, over = FakeJob(waits=True), threading.Event()

    def start(attempt: int) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # Python's handler runs here, in this thread
        return job

    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert supervise.supervise(engine(), start).outcome is Outcome.STOPPED
    finally:
        over.set()
        thread.join()
    assert job.calls == ["stop 10", "remove"]


def test_a_request_that_a_lost_engine_did_not_hear_is_made_again() -> None:
    class LostWhenAsked(FakeJob):
        def wait(self) -> ExitStatus:
            until(lambda: self.calls)
            raise ConnectionLost("went while it was asked")

    first, back = LostWhenAsked(), FakeJob(waits=True, end=ExitStatus(0))
    signals((signal.SIGTERM, ready))
    found = supervise.supervise(engine(back), never, job=first)
    assert (first.calls, back.calls) == (["stop 10"], ["stop 10", "remove"])
    assert found.outcome is Outcome.STOPPED


class Attempts:
    """Starts a job of each ending in turn."""

    def __init__(self, *ends: ExitStatus) -> None:
        self.jobs = [FakeJob(end=end) for end in ends]
        self.asked: list[int] = []

    def __call__(self, attempt: int) -> Any:
        self.asked.append(attempt)
        return self.jobs[attempt]


def test_it_is_not_started_again_after_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Attempts(ExitStatus(1), ExitStatus(0))
    start.jobs[0].waits = True
    signals((signal.SIGINT, ready))
    assert supervise.supervise(engine(), start, restarts=5).code == 1
    assert start.asked == [0]
    start = Attempts(ExitStatus(1), ExitStatus(0))  # from elsewhere, in the pause
    monkeypatch.setattr(supervise.Stopper, "wait", lambda self, seconds: owner.ask_to_stop(RUN))
    assert supervise.supervise(engine(), start, restarts=1).code == 1
    assert start.asked == [0]


def test_a_stop_in_the_pause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(supervise, "LONGEST_PAUSE", 60.0)
    start = Attempts(*[ExitStatus(1)] * 9)
    said: list[str] = []
    monkeypatch.setattr(supervise, "tell", said.append)
    signals((signal.SIGINT, lambda: "starting it again: 1 of 8 times" in said))
    assert supervise.supervise(engine(), start, restarts=8).code == 1
    assert start.asked == [0]
    assert said[-1] == "stopped before it was restarted"
    assert start.jobs[0].calls == ["remove"]


def test_a_guest_leaves_the_run_to_its_owner(capfd: pytest.CaptureFixture[str]) -> None:
    job = FakeJob(pieces=[OutputPiece(False, b"loss\n")], end=ExitStatus(3))
    found = supervise.supervise(engine(), never, restarts=5, job=job, guest=True)
    assert (found.code, job.calls) == (3, [])
    assert capfd.readouterr().out == "loss\n"
    with owner.following(RUN) as nobody_else:  # no lock was held, and no stop asked for
        assert nobody_else
    assert not owner.asked_to_stop(RUN)
    job = FakeJob(end=ExitStatus(1))
    with owner.following(RUN):  # nor is it started again where another follows it
        found = supervise.supervise(engine(), never, restarts=3, job=job)
    assert (found.code, job.calls) == (1, [])
    supervise.supervise(engine(), never, job=job)
    assert job.calls == ["remove"]


@pytest.mark.parametrize("signum", supervise.SIGNALS)
def test_a_signal_ends_a_guest_alone(signum: signal.Signals) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    job = FakeJob(waits=True)
    before = signal.signal(signum, interrupt)
    sending = threading.Timer(0.2, lambda: os.kill(os.getpid(), signum))
    sending.start()
    try:
        with pytest.raises(Interrupted):
            supervise.supervise(engine(), never, job=job, guest=True)
    finally:
        sending.join()
        signal.signal(signum, before)
    assert job.calls == []


@pytest.mark.parametrize(("own", "told"), [(600, "25 s"), (20, "20 s")])
def test_stop_says_where_the_log_of_an_unfollowed_run_is(
    capsys: pytest.CaptureFixture[str], own: int, told: str
) -> None:
    job = FakeJob(labels={"megatron-launchpad.stop_grace": str(10 + own)})
    job.stop = lambda grace: setattr(job, "over", True)
    supervise.stop(job, grace=25)
    asked, hint = capsys.readouterr().err.splitlines()
    assert asked == f"launcher: asked run {RUN} to stop; it has {told}."
    assert hint.endswith(f"launcher attach {RUN}")
    assert job.calls == []
    supervise.stop(job)
    assert job.calls == ["remove"]


@pytest.mark.parametrize(
    ("now", "over", "end", "outcome"),
    [
        (False, False, ExitStatus(143), "stopped"),
        (False, True, ExitStatus(143), "failed"),
        # a killed run ends a moment later, or is gone by then
        (True, False, ExitStatus(137), "stopped"),
        (True, False, ExitStatus(137, EndCause.REMOVED), "stopped"),
    ],
)
def test_stop_keeps_how_a_run_ended_that_nobody_followed(
    now: bool, over: bool, end: ExitStatus, outcome: str
) -> None:
    """`runs` called it unknown for ever."""
    job, looks = FakeJob(end=end, over=over), iter([None, None, None])
    job.stop = lambda grace: setattr(job, "over", True)
    if now:
        job.ended = lambda: next(looks, job.end)
    supervise.stop(job, grace=25, now=now)
    [told] = record.read_lines(record.folder(RUN) / record.ENDINGS)
    assert (told["attempt"], told["outcome"], told["code"]) == (0, outcome, end.code)
    assert (told["by"] == "launcher stop") is (outcome == "stopped")
    supervise.stop(job)  # which removes it, and has nothing to add
    assert len([*record.read_lines(record.folder(RUN) / record.ENDINGS)]) == 1


def test_stop_waits_no_longer_than_it_may_for_a_run_that_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "ENDS_SECONDS", 0.0)
    supervise.stop(FakeJob(), now=True)
    assert not (record.folder(RUN) / record.ENDINGS).exists()


@pytest.fixture
def closed_pipe() -> Iterator[TextIO]:
    """A stream that nobody reads."""
    near, far = os.pipe()
    os.close(near)
    with os.fdopen(far, "w") as stream:
        yield stream


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_run_whose_output_nobody_reads_is_asked_to_stop_and_waited_for(
    monkeypatch: pytest.MonkeyPatch, closed_pipe: TextIO, stream: str
) -> None:
    job = FakeJob(
        [OutputPiece(False, b"line\n"), OutputPiece(False, b"line\n")],
        waits=True,
        end=ExitStatus(7),
    )
    if stream == "stderr":  # where the launcher's own messages go
        signals((signal.SIGINT, ready))
    with monkeypatch.context() as patched:
        patched.setattr(f"sys.{stream}", closed_pipe)
        found = supervise.supervise(engine(), never, job=job)
    assert (found.outcome, found.code) == (Outcome.STOPPED, 7)
    assert job.calls == ["stop 10", "remove"]


def test_ctrl_c_that_ends_the_reader_first_is_one_request(
    monkeypatch: pytest.MonkeyPatch, closed_pipe: TextIO
) -> None:
    """As of `launcher run | tee log`: the pipe's end may be seen before the signal is heard."""
    lost = threading.Event()
    to_nowhere = live.to_nowhere
    monkeypatch.setattr(supervise, "to_nowhere", lambda file: (to_nowhere(file), lost.set()))
    job = FakeJob([OutputPiece(False, b"line\n")], waits=True)
    signals((signal.SIGINT, lambda: ready() and lost.is_set()))
    with monkeypatch.context() as patched:
        patched.setattr("sys.stdout", closed_pipe)
        supervise.supervise(engine(), never, job=job)
    assert job.calls == ["stop 10", "remove"]


def test_a_closed_pipe_of_one_who_looks_on_leaves_the_run(
    monkeypatch: pytest.MonkeyPatch, closed_pipe: TextIO
) -> None:
    job = FakeJob([OutputPiece(False, b"line\n")])
    with owner.following(RUN), monkeypatch.context() as patched:
        patched.setattr("sys.stdout", closed_pipe)
        with pytest.raises(BrokenPipeError):
            supervise.supervise(engine(), never, job=job)
        os.dup2(os.open(os.devnull, os.O_WRONLY), closed_pipe.fileno())
    assert job.calls == []


def test_folders_that_cannot_be_looked_at_do_not_hide_the_ending(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(root: Path, line: str = "") -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(supervise.find.folders, "newest_complete", refuse)
    supervise.supervise(engine(), never, job=FakeJob(end=ExitStatus(3), labels=LABELS))
    assert capsys.readouterr().err.splitlines() == [
        "launcher: can't look for checkpoints in /no/such/folder: Permission denied",
        f"launcher: run {RUN} failed, exit code 3",
        f"launcher: its record: {record.folder(RUN)}",
    ]


def test_a_listener_that_fails_is_told_of_once_and_the_run_goes_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Broken:
        def add(self, data: bytes, is_error: bool) -> None:
            raise OverflowError("too large")

    heard = list[bytes]()
    other = SimpleNamespace(add=lambda data, is_error: heard.append(data))
    pieces = b"one\n", b"", b"two\n"  # an empty one says that the run goes on
    job = FakeJob([OutputPiece(False, piece) for piece in pieces], ExitStatus(0))
    found = supervise.supervise(
        engine(), never, job=job, listening=lambda job: nullcontext([Broken(), other])
    )
    assert found.outcome is Outcome.FINISHED
    told = capfd.readouterr()
    assert told.out == "one\ntwo\n"
    assert heard == [*pieces]
    assert told.err.count("the broken has ended, the run goes on: OverflowError: too large") == 1
