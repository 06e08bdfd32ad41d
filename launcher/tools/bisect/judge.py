"""What came of a trial, and whether it fails as BAD does. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from launcher.tools.bisect.halving import Verdict

SKIP = 125
"""The exit code by which a command says that a run can't be judged, as for `git bisect run`."""

NUMBER = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8}\b|\d+")
"""Numbers, addresses and runs' ids."""


@dataclass(frozen=True)
class TrialOutcome:
    """What came of a trial.

    code: the run's exit code; None where it wasn't started, for the reason `why`. cause: why it
    failed, by `explain` or in its own words; "" where it ended well. said: the line that shows it.
    loss: of its last step, in
    nats a token; None where none was logged. ms: a step's, the median. check: the exit code of the
    user's command. log: the file with its output. seconds: that it took, builds included.
    """

    code: int | None = None
    cause: str = ""
    said: str = ""
    loss: float | None = None
    ms: float | None = None
    check: int | None = None
    why: str = ""
    log: str = ""
    seconds: float = 0.0

    @property
    def told(self) -> str:
        """It in a few words."""
        if self.code is None:
            return f"not started: {self.why}"
        words = dict.fromkeys([f"exit code {self.code}", self.cause, self.said])
        parts = [": ".join(filter(None, words))]
        parts += [f"loss {self.loss:.6g}"] if self.loss is not None else []
        parts += [f"{self.ms:.4g} ms a step"] if self.ms is not None else []
        parts += [f"the command: {self.check}"] if self.check is not None else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Judge:
    """What counts as failing: by default an exit code other than 0, for the cause that BAD has.

    Or one of these. cause: words of the cause. loss: how far from GOOD's is too far. ms: how many
    times GOOD's ms a step are too many. check: whether a command of the user's says it.
    """

    cause: str = ""
    loss: float | None = None
    ms: float | None = None
    check: bool = False

    @property
    def compares(self) -> bool:
        """Whether it needs GOOD's outcome."""
        return self.loss is not None or self.ms is not None

    def verdict(
        self, outcome: TrialOutcome, good: TrialOutcome | None, bad: TrialOutcome | None
    ) -> Verdict:
        """The verdict of a trial; `good` and `bad` are what came of the ends, as far as is known.

        One that failed in another way than `bad` is no answer. Where `bad` isn't started, as its
        image can't be built, that is the failure.
        """
        if outcome.code is None:
            judged = bool(self.check or self.compares or self.cause)
            same = bad is not None and bad.code is None and _alike(outcome.why) == _alike(bad.why)
            return Verdict.BAD if same and not judged else Verdict.SKIPPED
        if self.check:
            if outcome.check is None or outcome.check == SKIP:
                return Verdict.SKIPPED
            return Verdict.BAD if outcome.check else Verdict.GOOD
        if self.compares:
            return self._compared(outcome, good or outcome)
        if outcome.code == 0:
            return Verdict.GOOD
        wanted = self.cause.lower()
        if wanted:
            return Verdict.BAD if wanted in outcome.cause.lower() else Verdict.SKIPPED
        same = bad is None or (bool(bad.code) and _alike(outcome.cause) == _alike(bad.cause))
        return Verdict.BAD if same else Verdict.SKIPPED

    def _compared(self, outcome: TrialOutcome, good: TrialOutcome) -> Verdict:
        """By loss or ms beside GOOD's; what has none, or failed, can't be judged."""
        pair = (outcome.ms, good.ms) if self.loss is None else (outcome.loss, good.loss)
        value, reference = pair
        if value is None or reference is None or outcome.code:
            return Verdict.SKIPPED
        if self.loss is None:
            near = value <= reference * (self.ms or 1)
        else:
            near = abs(value - reference) <= self.loss  # which NaN isn't
        return Verdict.GOOD if near else Verdict.BAD


def _alike(cause: str) -> str:
    """A cause without its numbers, which differ from run to run."""
    return NUMBER.sub("#", cause)
