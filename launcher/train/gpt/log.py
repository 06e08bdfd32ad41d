"""Lines in upstream's log format, so that what reads one program's log reads the other's."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """What happened since the last line; `loss` and `grad_norm` are None if nothing advanced."""

    iteration: int
    train_iters: int
    consumed_samples: int
    milliseconds: float
    learning_rate: float
    global_batch_size: int
    loss: float | None
    loss_scale: float
    grad_norm: float | None
    skipped: int
    nan: int


def training_line(interval: Interval, time: str) -> str:
    """The line for an interval of iterations; `time` is like 2025-04-13 23:41:20."""
    fields = [
        f"iteration {interval.iteration:8d}/{interval.train_iters:8d}",
        f"consumed samples: {interval.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {interval.milliseconds:.1f}",
        f"learning rate: {interval.learning_rate:.6E}",
        f"global batch size: {interval.global_batch_size:5d}",
    ]
    if interval.loss is not None:
        fields.append(f"lm loss: {interval.loss:.6E}")
    fields.append(f"loss scale: {interval.loss_scale:.1f}")
    if interval.grad_norm is not None:
        fields.append(f"grad norm: {interval.grad_norm:.3f}")
    fields.append(f"number of skipped iterations: {interval.skipped:3d}")
    fields.append(f"number of nan iterations: {interval.nan:3d}")
    return f" [{time}] " + " | ".join(fields) + " |"


def validation_line(iteration: int, loss: float) -> str:
    """The line for an evaluation: mean loss per token in nats, and its perplexity."""
    perplexity = math.exp(min(20.0, loss))
    return (
        f"validation loss at iteration {iteration} | "
        f"lm loss value: {loss:.6E} | lm loss PPL: {perplexity:.6E} | "
    )
