"""The learning rate as a function of the optimizer's steps."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LearningRate:
    """Linear warmup from 0, then decay to a minimum; upstream's schedule.

    Counts are steps that the optimizer took: one skipped for an overflow doesn't count.
    """

    peak: float
    minimum: float
    style: str
    warmup: float
    decay: int

    def at(self, steps: int) -> float:
        """The rate after `steps` steps, that is, the one that step `steps` + 1 uses."""
        if self.warmup > 0 and steps <= self.warmup:
            return self.peak * steps / self.warmup
        if self.style == "constant":
            return self.peak
        if steps > self.decay:
            return self.minimum
        done = (steps - self.warmup) / (self.decay - self.warmup)
        left = 1.0 - done if self.style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
        return self.minimum + left * (self.peak - self.minimum)


def from_arguments(arguments: argparse.Namespace) -> LearningRate:
    """The schedule that the command line asks for."""
    warmup = float(arguments.lr_warmup_iters)
    if arguments.lr_warmup_fraction is not None:
        warmup = arguments.lr_warmup_fraction * arguments.lr_decay_iters
    return LearningRate(
        peak=arguments.lr,
        minimum=arguments.min_lr,
        style=arguments.lr_decay_style,
        warmup=warmup,
        decay=arguments.lr_decay_iters,
    )
