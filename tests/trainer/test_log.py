"""The log's lines are upstream's to the character."""

from __future__ import annotations

from typing import Any

from launcher.trainer.gpt.log import training_line, validation_line

INTERVAL: dict[str, Any] = {
    **{"iteration": 20, "train_iters": 1000, "consumed_samples": 320, "global_batch_size": 16},
    **{"milliseconds": 820.7, "learning_rate": 4e-5, "loss": 10.72453, "loss_scale": 131072.0},
    **{"grad_norm": 3.874, "skipped": 0, "nan": 0},
}
LOSS = " lm loss: 1.072453E+01 |"
NORM = " grad norm: 3.874 |"
LINE = (
    " [2025-04-13 23:41:20] iteration       20/    1000 | consumed samples:          320 | "
    "elapsed time per iteration (ms): 820.7 | learning rate: 4.000000E-05 | "
    f"global batch size:    16 |{LOSS} loss scale: 131072.0 |{NORM} "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_training_line() -> None:
    """Where nothing advanced, there is neither loss nor norm."""
    assert training_line("2025-04-13 23:41:20", **INTERVAL) == LINE
    nothing = INTERVAL | {"loss": None, "grad_norm": None}
    without = LINE.replace(LOSS, "").replace(NORM, "")
    assert training_line("2025-04-13 23:41:20", **nothing) == without
    spent = LINE.replace("820.7 |", "820.7 | energy per GPU (J/iter/GPU): 512.25 |")
    assert training_line("2025-04-13 23:41:20", **INTERVAL, energy=512.25) == spent


def test_validation_line() -> None:
    assert validation_line(50, 8.88954) == (
        "validation loss at iteration 50 | lm loss value: 8.889540E+00 | "
        "lm loss PPL: 7.255681E+03 | "
    )
