"""The guard of a run: what it tells and keeps, what it ends, and what a run goes back to."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.agent.checkpoints import completeness, folders, lineage
from launcher.base.errors import UsageError
from launcher.base.names import LABEL
from launcher.runs.follow import guard
from launcher.runs.follow.guard import LossGuard
from launcher.runs.plan.job import ExitStatus
from launcher.runs.records import plot, record
from launcher.runs.records.ending import Ending, Outcome
from launcher.runs.records.metrics import parse_all
from launcher.runs.records.watch import RecordWatch
from launcher.runs.runfile import config, origins
from tests.agent.test_peers import STEP_LINES
from tests.plans import MINIMAL
from tests.runs.conftest import RUN, FakeJob

HEARD = "runner: the loss or gradient was NaN from iteration 230 to the end\n"
NAN_ENDED = "AssertionError: Rank 3: found NaN in local grad norm in backward pass\n"


@dataclass
class Site:
    """A run's record and checkpoints, and what its guard has told."""

    saves: Path
    monkeypatch: pytest.MonkeyPatch
    told: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def saved(self, *iterations: int) -> None:
        self.monkeypatch.setattr(completeness, "problem", lambda path: "")
        self.saves.mkdir()
        lineage.claim(self.saves, RUN, RUN)
        for iteration in iterations:
            folders.folder(self.saves, iteration).mkdir()
            (self.saves / folders.TRACKER).write_text(str(iteration))

    @property
    def left(self) -> list[str]:
        return sorted(path.name for path in self.saves.glob("iter_*"))

    def run(
        self, losses: list[float], attempt: int = 0, begins: int = 1, **wanted: Any
    ) -> LossGuard:
        """The guard, once an attempt has told its losses, each of ten iterations."""
        kept = SimpleNamespace(
            asked=lambda: SimpleNamespace(config=SimpleNamespace(guard=config.Guard(**wanted)))
        )
        self.monkeypatch.setattr(record, "find", lambda run: kept)
        self.monkeypatch.setattr(
            record, "read", lambda run, name: {"options": {"log_interval": "10"}}
        )
        labels = {f"{LABEL}checkpoints": str(self.saves), f"{LABEL}run": RUN}
        job: Any = FakeJob(labels=labels)
        reporting = self.told.append, self.shown.append, self.ended.set
        with guard.guarding(job, attempt, *reporting) as guards:
            (one,) = guards
            with RecordWatch(
                record.folder(RUN), attempt, seen=lambda found, _: one.see(found)
            ) as watch:
                for number, loss in enumerate(losses, begins):
                    line = f" iteration {10 * number}/ 900 | {TIME} | lm loss: {loss:.6E} |\n"
                    watch.add(line.encode(), False)
                    one.add(line.encode(), False)
        return one


TIME = "elapsed time per iteration (ms): 5.0"
GOOD = [2.0 + 0.01 * (number % 3) for number in range(22)]
FAILED = Ending(ExitStatus(137), False, "", guarded="it")
SKIPPED = "lm loss: 2.0E+00 | number of skipped iterations: 1 | number of nan iterations: 1 |"
FINISHED = "finished after iteration 240\n"


@pytest.fixture
def site(tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path / "saves", monkeypatch)


def kinds() -> list[str]:
    return [each["kind"] for each in plot.read_metrics(RUN) if each["kind"] != plot.STEP]


def test_it_warns_and_leaves_the_run_alone(site: Site) -> None:
    one = site.run([*GOOD, 9.0, 2.0, math.nan])
    assert [text.partition(":")[2].split(":")[0] for text in site.told] == [
        " spike at iteration 230", " nan at iteration 250",
    ]  # fmt: skip
    assert site.shown == ["spike at 230", "nan at 250"]
    assert (one.settle(FAILED), guard.verdict([one]), kinds()) == ("", "", ["alarm"] * 2)
    assert plot.curves("a", plot.read_metrics(RUN)).alarms == [(230, "spike"), (250, "nan")]


def test_a_run_that_ends_with_nan_has_failed_and_nothing_resumes_from_it(site: Site) -> None:
    """It ended as finished with 0, and resume, generate and export took its weights of NaN."""
    site.saved(210, 220, 230, 240)
    one = site.run([*GOOD, math.nan, math.nan])
    ended = Ending(ExitStatus(0), False, FINISHED, diverged=guard.diverged([one]))
    assert (ended.outcome, ended.code, ended.may_restart) == (Outcome.FAILED, 1, False)
    assert ended.reason == "the loss or gradient was NaN from iteration 230 to the end"
    assert one.settle(ended) == ""
    assert site.left == ["iter_0000210", *(f"iter_0000{n}.rejected" for n in (220, 230, 240))]


@pytest.mark.parametrize(
    ("losses", "wanted"), [([math.nan, 2.0], {}), ([math.nan], {"on_nan": "ignore"}), ([9.0], {})]
)
def test_a_run_whose_last_numbers_are_good_or_ignored_has_finished(
    site: Site, losses: list[float], wanted: dict[str, Any]
) -> None:
    assert guard.diverged([site.run([*GOOD, *losses], **wanted)]) == ""


@pytest.mark.parametrize(
    "last",
    [SKIPPED, "grad norm: 0.5 | number of skipped iterations: 0 | number of nan iterations: 0 |"],
)
def test_weights_that_take_good_steps_are_not_nan(site: Site, last: str) -> None:
    """fp16 skips a step in 100; Megatron's mean is NaN where one batch has no token to learn."""
    one = site.run(GOOD)
    for line, number in ((last, 230), (last, 240)):
        for step in parse_all(f" iteration {number}/ 900 | {TIME} | {line}\n"):
            one.see(step)
        one.add(b"", False)
    assert guard.diverged([one]) == ""
    assert sum(" nan at iteration 230" in text for text in site.told) == 1


@pytest.mark.parametrize("line", STEP_LINES)
def test_the_launcher_judges_lines_as_a_rank_does(line: str, site: Site) -> None:
    one = site.run(GOOD)
    one.see(*parse_all(f" iteration 230/ 900 | {TIME} | {line}\n"))
    one.add(b"", False)
    assert ("from iteration 230 " in guard.diverged([one])) == bool(STEP_LINES[line])


def test_a_launcher_without_the_lines_of_steps_hears_of_nan_from_its_node(site: Site) -> None:
    """Of several launchers the last rank's alone saw it; the first one's checkpoints stayed."""
    site.saved(210, 220, 230, 240)
    one = site.run([])
    ended = Ending(ExitStatus(0), False, FINISHED, diverged=guard.diverged([one], HEARD))
    assert (ended.outcome, one.settle(ended)) == (Outcome.FAILED, "")
    assert site.left == ["iter_0000210", *(f"iter_0000{n}.rejected" for n in (220, 230, 240))]
    assert guard.diverged([site.run([], on_nan="ignore")], HEARD) == ""


def test_a_nan_that_stays_counts_from_where_it_stays(site: Site) -> None:
    """The first line had a good step; a second one in a row is no alarm of its own."""
    one = site.run(GOOD)
    for number, more in ((230, SKIPPED), (240, "lm loss: nan |")):
        one.see(*parse_all(f" iteration {number}/ 900 | {TIME} | {more}\n"))
        one.add(b"", False)
    assert "from iteration 240 " in guard.diverged([one])


def test_what_a_run_went_on_from_is_not_put_away(site: Site) -> None:
    """A run that is NaN from its first line on cost the days of the one before."""
    site.saved(200, 220)
    lineage.put(folders.folder(site.saves, 200), lineage.LineageNote("feedbeef", RUN))
    one = site.run([math.nan, math.nan], begins=21)
    ended = Ending(ExitStatus(0), False, FINISHED, diverged=guard.diverged([one]))
    assert one.settle(ended) == ""
    assert site.left == ["iter_0000200", "iter_0000220.rejected"]


def test_what_is_to_be_ignored_is_not_even_told(site: Site) -> None:
    site.run([*GOOD, 9.0], on_spike="ignore")
    assert (site.told, kinds()) == ([], [])


def test_it_ends_a_run_and_puts_away_what_a_nan_was_saved_in(site: Site) -> None:
    site.saved(210, 220, 230)
    one = site.run([*GOOD, math.nan], on_nan="end")
    assert site.ended.wait(30)
    assert guard.verdict([one]).startswith("nan at iteration 230")
    assert one.settle(FAILED) == ""
    assert site.left == ["iter_0000210", "iter_0000220.rejected", "iter_0000230.rejected"]
    assert not FAILED.may_restart


def test_a_loss_that_stands_still_ends_a_run_where_that_is_asked_for(site: Site) -> None:
    """And takes no checkpoint away: its weights are as good as before."""
    site.saved(210)
    one = site.run([*GOOD, *[GOOD[-1]] * 20], on_flat="end")
    assert site.ended.wait(30)
    assert guard.verdict([one]).startswith("flat at iteration ")
    assert one.settle(FAILED) == ""
    assert site.left == ["iter_0000210"]


def test_a_run_goes_back_past_the_batches_and_to_what_a_step_was_good_after(site: Site) -> None:
    site.saved(200, 215, 220, 225)
    one = site.run([*GOOD, 9.0], on_spike="rewind")
    job: Any = one.job
    assert job.ending.wait(30)
    back = guard.settle([one], FAILED)
    assert back == "going back to iteration 215, past the batches of iterations 220 to 230"
    assert site.left[:2] == ["iter_0000200", "iter_0000215"]
    assert (site.saves / folders.TRACKER).read_text() == "215"
    assert guard.passed_over(RUN) == {*range(220, 231)}
    assert [step["iteration"] for step in plot.continued(plot.read_metrics(RUN))][-1] == 210


def test_after_going_back_it_knows_the_lines_before(site: Site) -> None:
    """Else the next lines could rise unseen, as at a run's beginning."""
    site.saved(200)
    site.run([*GOOD, 9.0], on_spike="rewind").settle(FAILED)
    site.run([2.0, 9.0], attempt=1, begins=21, on_spike="rewind")
    assert "spike at iteration 220" in site.told[-2]


def test_it_goes_back_so_often_and_then_ends_it(site: Site) -> None:
    for attempt in range(2):
        one = site.run([*GOOD, math.nan], attempt=attempt, on_nan="rewind", max_rewinds=1)
        back = one.settle(FAILED)
        assert back.startswith("going back to its beginning") is (attempt == 0)
    assert guard.rewinds(RUN) == 1
    assert "it was rewound 1 times, and ends now" in site.told


@pytest.mark.parametrize(("asked", "back"), [(False, True), (True, False)])
def test_a_program_that_ends_itself_for_a_nan_goes_back_too(
    site: Site, asked: bool, back: bool
) -> None:
    one = site.run(GOOD, on_nan="rewind")
    assert bool(one.settle(Ending(ExitStatus(1), asked, NAN_ENDED))) is back
    assert guard.passed_over(RUN) == ({*range(220, 231)} if back else set())


def test_another_nodes_launcher_puts_nothing_away(site: Site) -> None:
    """It doesn't know whose the checkpoints are."""
    site.saved(230)
    one = site.run([*GOOD, math.nan], on_nan="end")
    job: Any = one.job
    job.labels[f"{LABEL}node"] = "1"
    one.settle(FAILED)
    assert site.left == ["iter_0000230"]


def test_none_guards_where_all_is_ignored(site: Site) -> None:
    with pytest.raises(ValueError, match="unpack"):
        site.run([], on_nan="ignore", on_spike="ignore", on_flat="ignore")


@pytest.mark.parametrize(
    ("detach", "chosen", "nodes", "why"),
    [
        (True, {}, 1, "--detach"),
        (False, {"shares_files": False}, 1, "seen from here"),
        (False, {}, 2, "one launcher that starts all nodes"),
        (False, {"every_node": True}, 2, ""),
    ],
)
def test_what_cannot_go_back_is_refused(
    write: Callable[[str], str], detach: bool, chosen: dict[str, bool], nodes: int, why: str
) -> None:
    text = f"{MINIMAL}guard: {{on_nan: rewind}}\nnodes: {{count: {nodes}, master_addr: a}}\n"
    given, origin = origins.load(write(text), [])
    asked: Any = SimpleNamespace(config=given, origin=origin)
    whole = {"shares_files": True, "every_node": False, "scheduled": False} | chosen
    backend: Any = SimpleNamespace(**whole)
    if not why:
        guard.check_guard(asked, backend, detach=detach)
        return
    with pytest.raises(UsageError, match=why) as refused:
        guard.check_guard(asked, backend, detach=detach)
    assert "line 5" in str(refused.value) or ":5" in str(refused.value)
