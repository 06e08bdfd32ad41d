"""What a run's numbers show: what is wrong is found at its line, and nothing where all is well."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.records.alarms import FLAT, NAN, SPIKE, Detector
from launcher.records.metrics import Step


def step(iteration: int, loss: float | None, **more: Any) -> Step:
    return Step(iteration, 1000, 10.0, loss=loss, **more)


def alarms(steps: Iterable[Step]) -> list[tuple[int, str]]:
    """Iterations and kinds, with the run file's defaults."""
    detector = Detector(50, 8.0)
    return [(one.iteration, one.kind) for each in steps for one in detector.judge(each)]


def well(seed: int, lines: int, noise: float = 0.02, ends: float = 2.0) -> list[Step]:
    """A loss that falls from 10.8, as noisy as a small batch's, and its gradient's norm.

    The norm begins high, and a fifth of it is noise.
    """
    chance = random.Random(seed)  # noqa: S311
    return [
        step(
            number,
            ends + (10.8 - ends) * math.exp(-number / 40) + chance.gauss(0, noise * ends),
            grad_norm=(0.8 + 4 * math.exp(-number / 10)) * math.exp(chance.gauss(0, 0.2)),
        )
        for number in range(1, lines + 1)
    ]


@given(st.integers(), st.floats(0.001, 0.05), st.floats(0.05, 6.0))
def test_no_alarm_where_all_is_well(seed: int, noise: float, ends: float) -> None:
    assert alarms(well(seed, 200, noise, ends)) == []


@given(st.integers(2, 60), st.floats(1e-3, 2.0), st.integers())
def test_no_alarm_while_the_learning_rate_warms_up(lines: int, fall: float, seed: int) -> None:
    """A loss that hardly moves, or falls at once, is no flat one and no spike."""
    chance = random.Random(seed)  # noqa: S311
    steps = [
        step(n, 10.8 - fall * n / lines + chance.gauss(0, 0.01), grad_norm=2.0 + 5 / n)
        for n in range(1, lines + 1)
    ]
    assert alarms(steps) == []


@given(st.integers(), st.integers(20, 199), st.sampled_from(["nan", "inf", "spike", "grad_norm"]))
def test_what_is_planted_is_found_at_its_line(seed: int, at: int, kind: str) -> None:
    steps = well(seed, 200)
    worse: dict[str, Any] = {
        "nan": {"loss": math.nan},
        "inf": {"grad_norm": math.inf},
        "spike": {"loss": steps[at].loss or 0.0},
        "grad_norm": {"grad_norm": 60.0},
    }[kind]
    if kind == "spike":
        worse["loss"] += 3.0
    steps[at] = step(at + 1, **{"loss": steps[at].loss, "grad_norm": 1.0} | worse)
    assert alarms(steps) == [(at + 1, NAN if kind in ("nan", "inf") else SPIKE)]


@given(st.integers(), st.integers(10, 150))
def test_a_loss_that_stands_still_is_told_once_and_within_three_lines(seed: int, at: int) -> None:
    steps = well(seed, 200)
    stuck = [step(one.iteration, steps[at - 1].loss, grad_norm=0.0) for one in steps[at:]]
    assert alarms([*steps[:at], *stuck]) == [(at + 2, FLAT)]


@pytest.mark.parametrize(
    ("odd", "found"),
    [
        ({"loss": None, "nan": 1}, [NAN]),
        ({"loss": None, "skipped": 0}, [NAN]),  # as Megatron tells a NaN
        ({"loss": None, "skipped": 5}, []),  # fp16's scale is sought
        ({"loss": 2.0, "grad_norm": math.inf, "skipped": 1}, []),
        ({"loss": 2.0, "losses": {"mtp_1 loss": math.inf}}, [NAN]),
    ],
)
def test_what_lines_tell_of_a_loss_that_is_no_number(odd: dict[str, Any], found: list[str]) -> None:
    assert [kind for _, kind in alarms([step(1, 2.1), step(2, **odd)])] == found


def test_what_goes_on_is_told_again_only_after_it_was_well() -> None:
    losses = [2.0, math.nan, math.nan, 2.1, math.nan]
    assert [at for at, _ in alarms(step(n, x) for n, x in enumerate(losses))] == [1, 4]
