"""The loss on batches that are held out."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from launcher.trainer.gpt import samples
from launcher.trainer.gpt.measurements import Meter
from launcher.trainer.gpt.passes import Passes


class Evaluation:
    """Evaluates on the next held-out batches, which workers fetch while steps are taken."""

    def __init__(self, arguments: argparse.Namespace, held_out: Any, passes: Passes) -> None:
        self.count, self.passes = arguments.eval_iters, passes
        self.asked_for = bool(self.count) and held_out is not None
        self.loader = samples.loader(arguments, held_out if self.count else None, 0)
        self._fetch()

    def _fetch(self) -> None:
        self.batches = iter(self.loader) if self.loader else None

    def warm_up(self) -> None:
        """Have its kernels loaded before the first step: 0.2 s that an evaluation took more."""
        if self.asked_for:
            with self.passes.evaluating():
                self.passes(self.batches, forward_only=True)
            self._fetch()

    def measure(self, is_asked_to_stop: Callable[[], bool]) -> Meter | None:
        """The losses' sum, None where it is asked to stop meanwhile."""
        meter = Meter()
        with self.passes.evaluating():
            for _ in range(self.count):
                meter.add(self.passes(self.batches, forward_only=True), advanced=True)
                if is_asked_to_stop():
                    return None
        self._fetch()
        return meter
