"""The learning rate's schedule, against values worked out by hand and a log of upstream's."""

from __future__ import annotations

import pytest

from launcher.train.gpt import arguments as command_line
from launcher.train.gpt.learning_rate import LearningRate, from_arguments

from .conftest import TINY


@pytest.mark.parametrize(
    ("style", "steps", "rate"),
    [
        ("constant", 0, 0.0),
        ("constant", 5, 0.5),
        ("constant", 10, 1.0),
        ("constant", 999, 1.0),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("linear", 111, 0.1),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * 0.8535533905932737),
        ("cosine", 500, 0.1),
    ],
)
def test_warmup_of_10_then_decay_to_110(style: str, steps: int, rate: float) -> None:
    assert LearningRate(1.0, 0.1, style, 10, 110).at(steps) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(
    ("steps", "printed"),
    [(4, "4.000000E-05"), (9, "9.000000E-05"), (19, "9.998165E-05"), (29, "9.991823E-05")],
)
def test_a_log_of_upstreams(steps: int, printed: str) -> None:
    """Peak 1e-4, cosine to 1e-5 over 1000 iterations, 1 % warmup, the first 16 skipped."""
    assert f"{LearningRate(1e-4, 1e-5, 'cosine', 10, 1000).at(steps):.6E}" == printed


def test_fraction_is_of_the_decay() -> None:
    extra = ["--mock-data", "--lr-warmup-fraction", "0.01", "--lr-decay-iters", "1000"]
    assert from_arguments(command_line.parse([*TINY, *extra])).warmup == 10
