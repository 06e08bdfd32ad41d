"""Detects trouble in a run's numbers: NaN, infinity, a spike, a flat loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import NamedTuple

from launcher.runs.records.metrics import TrainingStep

NAN, SPIKE, FLAT = "nan", "spike", "flat"

FEWEST = 20
"""Lines that are known before one is called a spike; the window has as many at least.

Rates that warm up make losses and norms rise and fall again."""

RECENT = 5
"""Lines whose median is the level that a rise is measured from: a falling loss has no other."""

SAME, SHARE = 3, 1e-6
"""As many losses that differ by this share of them at most are flat: batches differ by more."""

DEVIATION = 1.4826
"""The standard deviation of normal numbers, in medians of what they are away from their own."""


class Measure(NamedTuple):
    """What is looked at, by its field's name; the deviation counts as a share and a size at least.

    Gradients vary by much in good runs, and clipping takes what is above 1.
    """

    field: str
    name: str
    share: float
    least: float


MEASURES = (
    Measure("loss", "the loss", 0.02, 0.02),
    Measure("grad_norm", "the gradient's norm", 0.25, 0.1),
)


@dataclass(frozen=True)
class Alarm:
    """What is wrong, by its kind and in words, by the line of an iteration."""

    kind: str
    iteration: int
    text: str

    def __str__(self) -> str:
        return f"{self.kind} at iteration {self.iteration}: {self.text}"


class Detector:
    """Looks at one step after the other; what goes on being wrong is reported once.

    `window` is how many lines a number is compared with, `threshold` the deviations that it may be
    above them.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self.threshold = threshold
        self.known = {measure.field: deque[float](maxlen=window) for measure in MEASURES}
        self.told = set[str]()

    def remember(self, field: str, value: object) -> None:
        """Take a number without judging it."""
        if isinstance(value, (int, float)) and isfinite(value):
            self.known[field].append(value)

    def judge(self, step: TrainingStep) -> list[Alarm]:
        """What is wrong from this step on."""
        found = {NAN: self._not_finite(step), SPIKE: self._spike(step)}
        for measure in MEASURES:
            self.remember(measure.field, getattr(step, measure.field))
        found[FLAT] = self._flat() if step.loss is not None else ""
        wrong = {kind: text for kind, text in found.items() if text}
        new = [Alarm(kind, step.iteration, wrong[kind]) for kind in wrong if kind not in self.told]
        self.told = set(wrong)
        return new

    def _not_finite(self, step: TrainingStep) -> str:
        """Megatron's line has no loss where that was NaN and the step was taken all the same."""
        if step.nan:
            return f"the loss was no number in {step.nan} iterations"
        losses = {"the loss": step.loss, **step.losses}
        if not step.skipped:  # fp16 skips steps whose gradients overflow, and goes on
            losses["the gradient's norm"] = step.grad_norm
        odd = [(name, x) for name, x in losses.items() if x is not None and not isfinite(x)]
        if odd:
            return "{} was {}".format(*odd[0])
        gone = step.loss is None and step.skipped == 0 and self.known["loss"]
        return "the log has no loss, though steps were taken" if gone else ""

    def _spike(self, step: TrainingStep) -> str:
        for measure in MEASURES:
            value, known = getattr(step, measure.field), [*self.known[measure.field]]
            if value is None or not isfinite(value) or len(known) < FEWEST:
                continue
            far = score(value, known, measure)
            if far > self.threshold:
                was = median(known[-RECENT:])
                return f"{measure.name} rose from {was:.4g} to {value:.4g}, {far:.0f} deviations"
        return ""

    def _flat(self) -> str:
        last = [*self.known["loss"]][-SAME:]
        if len(last) < SAME or max(last) - min(last) > SHARE * abs(max(last)):
            return ""
        return f"the loss is {last[-1]:.6g} in {SAME} lines of the log, one after the other"


def score(value: float, known: Sequence[float], measure: Measure) -> float:
    """How many robust deviations a number is above the known ones, or above what they rise by."""
    levels = [median(known[at - RECENT : at]) for at in range(RECENT, len(known) + 1)]
    rises = [number - level for number, level in zip(known[RECENT:], levels, strict=False)]
    least = max(measure.share * abs(levels[-1]), measure.least)
    return max(_above(value, known, least), _above(value - levels[-1], rises, least))


def _above(value: float, known: Sequence[float], least: float) -> float:
    middle = median(known)
    spread = DEVIATION * median(abs(number - middle) for number in known)
    return (value - middle) / max(spread, least)
