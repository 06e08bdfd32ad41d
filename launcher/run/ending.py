"""What became of a run, from its exit code, its last words, and who asked it to end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from launcher.backends import Cause, Ended
from launcher.train.folders import Checkpoint
from launcher.train.runner import STOPPED

KILLED = 137
NEVER_BETTER = (2, 121)
"""Exit codes of a refusal: starting again would end the same way."""

FINISHED_LINE = "\nfinished after iteration "
FULL = "No space left on device"
RANK_LINE = "runner: rank "


class Outcome(Enum):
    """A stopped run was asked to end before it was done; a finished one was done."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Ending:
    """How a run ended; `asked` is whether this launcher asked it to, `tail` its last output.

    `lost` is whether the engine had gone in between.
    """

    ended: Ended
    asked: bool
    tail: str
    lost: bool = False

    @property
    def outcome(self) -> Outcome:
        """Whether it was done, was stopped, or failed."""
        stopped = self.asked or STOPPED in self.tail
        if self.ended.code == 0 and not (stopped and FINISHED_LINE not in self.tail):
            return Outcome.FINISHED
        return Outcome.STOPPED if stopped and not self._lost_to_engine else Outcome.FAILED

    @property
    def _lost_to_engine(self) -> bool:
        return self.lost and not self.asked

    @property
    def may_restart(self) -> bool:
        """Whether starting it again could help."""
        return self.outcome is Outcome.FAILED and self.ended.code not in NEVER_BETTER

    @property
    def reason(self) -> str:
        """Why it ended, in a few words; "" where its exit code says all there is to say."""
        if self.ended.cause is Cause.REMOVED:
            return "its container was removed from outside"
        if self._lost_to_engine:
            return "the engine was restarted under it"
        if self.ended.cause is Cause.MEMORY:
            return "out of memory: the container's limit was reached (resources.memory)"
        if FULL in self.tail:
            return "a disk is full"
        said = [line for line in self.tail.splitlines() if line.startswith(RANK_LINE)]
        if said:
            return said[0].removeprefix("runner: ")
        if self.ended.code == KILLED and not self.asked:
            return "killed from outside, by SIGKILL, not by its own runner"
        return ""


def describe(ending: Ending, run: str, saved: Checkpoint | None, saves: bool) -> list[str]:
    """What to tell of the end, line by line; nothing of a run that finished.

    `saved` is its newest complete checkpoint, and `saves` whether it has a folder for any.
    """
    if ending.outcome is Outcome.FINISHED:
        return []
    told = f"{ending.outcome.value}, exit code {ending.ended.code}"
    lines = [f"run {run} {told}: {ending.reason}" if ending.reason else f"run {run} {told}"]
    if saved:
        lines.append(f"newest complete checkpoint: {saved.folder} (iteration {saved.iteration})")
        lines.append(f"to go on: python3 -m launcher resume {run}")
    elif saves:
        lines.append("it saved no complete checkpoint")
    return lines
