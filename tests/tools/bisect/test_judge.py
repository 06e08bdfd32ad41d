"""What counts as failing: by exit code and cause, loss, time a step, or the user's command."""

from __future__ import annotations

import pytest

from launcher.tools.bisect.halving import Verdict
from launcher.tools.bisect.judge import SKIP, Judge, TrialOutcome

GOOD, BAD, SKIPPED = Verdict.GOOD, Verdict.BAD, Verdict.SKIPPED
WELL = TrialOutcome(0, loss=3.0, ms=100.0)
FAILED = TrialOutcome(1, "GPU memory is full", "tried to allocate 20 MiB")


@pytest.mark.parametrize(
    ("outcome", "verdict"),
    [
        (WELL, GOOD),
        (FAILED, BAD),
        (TrialOutcome(9, "GPU memory is full", "tried to allocate 3 MiB"), BAD),
        (TrialOutcome(1, "a disk is full"), SKIPPED),
        (TrialOutcome(why="no such release"), SKIPPED),
    ],
)
def test_a_run_that_fails_in_another_way_is_no_answer(
    outcome: TrialOutcome, verdict: Verdict
) -> None:
    """A commit that doesn't import was blamed for the memory that a later one took."""
    assert Judge().verdict(outcome, None, FAILED) is verdict


def test_an_image_that_cannot_be_built_is_a_failure_where_bad_is_one() -> None:
    """Which package of an extras set clashes is a question as good as another."""
    unbuilt, other = TrialOutcome(why="a needs b>=2"), TrialOutcome(why="no disk")
    verdicts = [Judge().verdict(one, None, unbuilt) for one in (unbuilt, other, WELL, FAILED)]
    assert verdicts == [BAD, SKIPPED, GOOD, SKIPPED]
    assert Judge(check=True).verdict(unbuilt, None, unbuilt) is SKIPPED


def test_words_of_a_cause_are_looked_for_in_any_case() -> None:
    judge = Judge(cause="gpu MEMORY")
    outcomes = [FAILED, TrialOutcome(1, "a disk is full"), WELL]
    assert [judge.verdict(one, None, None) for one in outcomes] == [BAD, SKIPPED, GOOD]


def test_numbers_in_a_cause_do_not_make_it_another() -> None:
    """Process ids and addresses differ from run to run."""
    one, other = (
        TrialOutcome(1, f"rank {n} at {place}") for n, place in ((3, "0x7f"), (14, "0xabc"))
    )
    assert Judge().verdict(other, None, one) is BAD


@pytest.mark.parametrize(
    ("loss", "verdict"), [(3.05, GOOD), (2.95, GOOD), (3.2, BAD), (2.8, BAD), (float("nan"), BAD)]
)
def test_a_loss_is_compared_with_goods(loss: float, verdict: Verdict) -> None:
    assert Judge(loss=0.1).verdict(TrialOutcome(0, loss=loss), WELL, None) is verdict


@pytest.mark.parametrize(("ms", "verdict"), [(10.0, GOOD), (119.0, GOOD), (121.0, BAD)])
def test_a_step_may_be_faster_than_goods(ms: float, verdict: Verdict) -> None:
    assert Judge(ms=1.2).verdict(TrialOutcome(0, loss=9.0, ms=ms), WELL, None) is verdict


@pytest.mark.parametrize("outcome", [TrialOutcome(0), TrialOutcome(1, "x", loss=9.0, ms=900.0)])
def test_a_run_without_a_loss_or_that_failed_cannot_be_compared(outcome: TrialOutcome) -> None:
    for judge in (Judge(loss=0.1), Judge(ms=1.2)):
        assert judge.verdict(outcome, WELL, None) is SKIPPED


@pytest.mark.parametrize(
    ("code", "verdict"), [(0, GOOD), (1, BAD), (3, BAD), (SKIP, SKIPPED), (None, SKIPPED)]
)
def test_a_command_judges_as_for_git_bisect_run(code: int | None, verdict: Verdict) -> None:
    """The run's own exit code is then its affair."""
    assert Judge(check=True).verdict(TrialOutcome(1, "x", check=code), None, None) is verdict
