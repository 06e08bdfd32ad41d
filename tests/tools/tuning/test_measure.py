"""When a run that is measured has said enough, by the lines of its log."""

from __future__ import annotations

import pytest

from launcher.runs.records.metrics import TrainingStep
from launcher.tools.tuning.measure import has_told, is_slow


@pytest.mark.parametrize(
    ("ms", "told", "slow"),
    [
        ((9000, 1000), False, False),
        ((9000, 1000, 1010), True, True),
        ((9000, 1060, 80), False, False),
        ((9000, 1060, 80, 82), True, False),
        ((9000, 80, 81, 80, 80), False, False),
    ],
    ids=["one line", "steady", "compiled in the second", "steady after that", "too short"],
)
def test_a_late_compilation_is_not_what_a_step_takes(
    ms: tuple[int, ...], told: bool, slow: bool
) -> None:
    """Upstream's fused functions compile in steps 6 to 10, which made 80 ms a step 1060."""
    steps = [TrainingStep(5 * (at + 1), 25, each) for at, each in enumerate(ms)]
    assert has_told(steps) == told
    assert is_slow(steps, 100.0) == slow
