"""Lines in upstream's log format, so that what reads one program's log reads the other's."""

from __future__ import annotations

import math


def training_line(
    time: str,
    *,
    iteration: int,
    train_iters: int,
    consumed_samples: int,
    milliseconds: float,
    learning_rate: float,
    global_batch_size: int,
    loss: float | None,
    loss_scale: float,
    grad_norm: float | None,
    skipped: int,
    nan: int,
    waited: float | None = None,
    energy: float | None = None,
) -> str:
    """The line for an interval of iterations; `time` is like 2025-04-13 23:41:20.

    `loss` and `grad_norm` are None if nothing advanced. Of an iteration, `waited` for data in ms,
    and `energy` in J of the last rank's GPU.
    """
    data = "" if waited is None else f" waiting for data (ms): {waited:.2f} |"
    spent = "" if energy is None else f" energy per GPU (J/iter/GPU): {energy:.2f} |"
    norm = "" if grad_norm is None else f" grad norm: {grad_norm:.3f} |"
    return (
        f" [{time}] iteration {iteration:8d}/{train_iters:8d} |"
        f" consumed samples: {consumed_samples:12d} |"
        f" elapsed time per iteration (ms): {milliseconds:.1f} |{spent}"
        f" learning rate: {learning_rate:.6E} |"
        f" global batch size: {global_batch_size:5d} |"
        + ("" if loss is None else f" lm loss: {loss:.6E} |")
        + f" loss scale: {loss_scale:.1f} |{norm}"
        f" number of skipped iterations: {skipped:3d} |"
        f" number of nan iterations: {nan:3d} |{data}"
    )


def validation_line(iteration: int, loss: float) -> str:
    """The line for an evaluation: mean loss per token in nats, and its perplexity."""
    perplexity = math.exp(min(20.0, loss))
    return (
        f"validation loss at iteration {iteration} | "
        f"lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
    )
