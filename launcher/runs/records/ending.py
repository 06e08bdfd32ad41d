"""Explains how a run ended, from its exit code, its last lines and who stopped it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from launcher.agent.checkpoints.folders import CheckpointFolder
from launcher.agent.words import STOPPED
from launcher.runs.plan.job import KILLED, EndCause, ExitStatus
from launcher.runs.records import failed_nodes, record

if TYPE_CHECKING:
    from launcher.runs.explain.failures import Explanation

ENGINE_FAILED, DIVERGED = 125, 1
NEVER_BETTER = (2, 121)
"""Exit codes of a refusal: starting again would end the same way."""

FINISHED_LINE = re.compile(r"^(node-\d+ \| )?finished after iteration ", re.MULTILINE)
ASKED_LINE = re.compile(r"runner: (.+): asked \d+ ranks to stop")
SIGNALLED_LINE = re.compile(
    r"^(node-\d+ \| )?(stopped after iteration \d+: asked to by a signal|"
    r".*exiting program after receiving SIG)",
    re.MULTILINE,
)
"""What our program and Megatron's own say where a signal has stopped them."""

TERMINATED, INTERRUPTED = 143, 130
RANK_LINE = re.compile(
    r"runner: ((?:killing rank |rank \d+ (?:exited|was killed) |node \d+ \().+)$", re.MULTILINE
)
"""The runner's own lines, but for those that say where ranks are, for which anybody may ask.

What one follows may be a line that a killed rank didn't end.
"""

OUT_OF_MEMORY = "out of memory"


class Outcome(Enum):
    """A stopped run was asked to end before it was done; a finished one was done."""

    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class Ending:
    """How a run ended; `asked` is whether a launcher asked it to, `tail` its last output.

    `stalled` is what the watchdog ended it for, `guarded` what the guard did, "" where they didn't.
    `diverged`: from where on its numbers were NaN, where it came to its end with exit code 0.
    """

    ended: ExitStatus
    asked: bool
    tail: str
    stalled: str = ""
    guarded: str = ""
    diverged: str = ""

    @property
    def outcome(self) -> Outcome:
        """Whether it was done, was stopped, or failed."""
        undisturbed = not (self._stopped or self._put_down)
        if self.ended.code == 0 and (undisturbed or FINISHED_LINE.search(self.tail)):
            return Outcome.FAILED if self.diverged else Outcome.FINISHED
        if self._put_down:
            return Outcome.FAILED
        if self.ended.cause is EndCause.ENGINE and not self.asked:
            return Outcome.FAILED  # an engine that ends asks its containers to stop
        return Outcome.STOPPED if self._stopped else Outcome.FAILED

    @property
    def _stopped(self) -> bool:
        lines = ASKED_LINE, SIGNALLED_LINE
        said = STOPPED in self.tail or any(line.search(self.tail) for line in lines)
        return self.asked or said

    @property
    def _put_down(self) -> bool:
        """Whether one of those who listen ended it."""
        return bool(self.stalled or self.guarded) and not self.asked

    @property
    def code(self) -> int:
        """The launcher's exit code: the run's own, but no 0 for one that was cut short.

        One that its launcher asked to stop has done what was asked, and keeps its 0.
        """
        if self.ended.code == 0 and self.outcome is Outcome.FAILED:
            return KILLED if self._put_down else DIVERGED if self.diverged else ENGINE_FAILED
        if self.ended.code == 0 and self.outcome is Outcome.STOPPED and not self.asked:
            asked = ASKED_LINE.search(self.tail)
            return INTERRUPTED if asked and "SIGINT" in asked[1] else TERMINATED
        return self.ended.code

    @property
    def may_restart(self) -> bool:
        """Whether starting it again could help; one that somebody removed stays away."""
        never = self.guarded or self.diverged or self.ended.code in NEVER_BETTER
        if never or self.ended.cause is EndCause.REMOVED:
            return False
        return self.outcome is Outcome.FAILED

    @property
    def itself(self) -> bool:
        """Whether it ended by itself, and only its log may say why."""
        return self.ended.cause is EndCause.ITSELF and not (self.ended.why or self._put_down)

    @property
    def _forced(self) -> bool:
        """Whether it was asked a second time, which no rank's end is the reason for."""
        return self.asked and self.ended.code == KILLED

    @cached_property
    def explained(self) -> Explanation:
        """The failure that its last output shows."""
        from launcher.runs.explain.failures import explain

        return explain([self.tail.encode(errors="replace")], self.ended.cause)

    @cached_property
    def blamed(self) -> tuple[str, str]:
        """The machine that it failed on, and the cause where that is its own; else "" of both."""
        return (
            failed_nodes.blame(self.ended, self.tail)
            if self.outcome is Outcome.FAILED
            else ("", "")
        )

    @property
    def clues(self) -> list[str]:
        """The known cause of a failure and its cure, or the line that looks most like a cause."""
        if self.outcome is not Outcome.FAILED or self.guarded:  # the guard has reported why
            return []
        signs, suspects = self.explained.signs, self.explained.suspects
        if signs:
            return signs[0].lines  # the others follow from it
        likely = suspects[:1] if self.itself else []
        return [f"no known cause; most like one: {line.text}" for line in likely]

    @property
    def sets(self) -> list[str]:
        """The keys, with values, that go on with it in spite of the failure."""
        return [sign.failure.sets for sign in self.explained.signs[:1] if sign.failure.sets]

    @property
    def full(self) -> bool:
        """Whether a disk is, and nothing failed before: a full /dev/shm has another cure."""
        return [sign.failure.name for sign in self.explained.signs[:1]] == ["a disk is full"]

    @property
    def reason(self) -> str:
        """Why it ended, in a few words; "" where its exit code says all there is to say."""
        if self._put_down:
            return self.stalled or self.guarded
        if self.ended.why and not self._forced:
            return self.ended.why
        if self.ended.cause is EndCause.REMOVED:
            return "it was removed from outside"
        if self.ended.cause is EndCause.ENGINE:
            return "the engine was restarted under it"
        said = RANK_LINE.search(self.tail)
        if self.ended.cause is EndCause.MEMORY and not (said and OUT_OF_MEMORY in said[1]):
            return "out of memory (the container's limit, resources.memory)"
        if self.outcome is Outcome.FINISHED or self.diverged:
            return self.diverged
        if self.full:
            return "a disk is full"
        if said and not (self._forced and "SIGTERM" in said[1]):
            return said[1]
        known = any(not sign.failure.follows for sign in self.explained.signs)
        if self.ended.code == KILLED and not self._stopped and not known:
            return "killed from outside, by SIGKILL"
        return ""


def describe(ending: Ending, run: str, saved: CheckpointFolder | None, folder: str) -> list[str]:
    """The lines to print about the end: one for a run that finished.

    `saved` is its newest complete checkpoint, and `folder` where it saves any, or "". The exit
    code is printed once: a rank's own line has it.
    """
    if ending.outcome is Outcome.FINISHED:
        return [f"run {run} finished{_kept(run, saved)}"]
    told, reason = f"run {run} {ending.outcome.value}", ending.reason
    if not re.search(rf"\bcode {ending.code}\b", reason):
        told += f", exit code {ending.code}"
    lines, sets = [f"{told}: {reason}" if reason else told], ""
    if ending.full and folder:
        lines.append(f"see what is free where it saves: {folder}")
    elif ending.clues:
        lines += ending.clues
        sets = "".join(f" --set {name}" for name in ending.sets)
        if not ending.explained.signs:
            lines.append(f"more from its log: launcher explain {run}")
    node, cause = ending.blamed
    if cause:
        lines.append(f"the node {node} caused it: {cause}; `launcher nodes` lists such nodes")
    if saved:
        lines.append(f"newest complete checkpoint: {saved.folder} (iteration {saved.iteration})")
        lines.append(f"to go on: launcher resume {run}{sets}")
    elif folder:
        lines.append("it saved no complete checkpoint")
    if (kept := record.folder(run)).is_dir():
        lines.append(f"its record: {kept}")
    return lines


def _kept(run: str, saved: CheckpointFolder | None) -> str:
    """Where a run's newest checkpoint and its record are, and what can be done with them."""
    folder, told, following = record.folder(run), "", list[str]()
    if saved:
        told += f"; newest checkpoint: {saved.folder} (iteration {saved.iteration})"
        more = f"launcher resume {run} --set training.train_iters={2 * saved.iteration}"
        following += [more, f"launcher generate {run} TEXT"]
        following += [f"launcher checkpoint export {run} -o FOLDER"]
    if (folder / record.FILE).is_file():
        told += f"; record: {folder}"
        following.append(f"launcher plot {run}")
    return f"{told}; next: {', '.join(following)}" if following else told


def write_ending(
    run: str, attempt: int, ending: Ending, signals: Sequence[str], saved: CheckpointFolder | None
) -> None:
    """Note how an attempt ended; `signals` are those that this launcher was sent, by name.

    attempt: 0 the first; ended: the time (ISO 8601); outcome: finished, stopped or failed; code:
    the launcher's exit code; cause: what the backend says; clues: what the log says of a failure;
    by: who ended it; checkpoint: the newest complete one; node: the machine that it failed on;
    node_cause: where that is its own. Where there is no record, or this is in it already, nothing
    is kept.
    """
    endings = record.read_lines(record.folder(run) / record.ENDINGS)
    if any(told.get("attempt") == attempt for told in endings):
        return
    node, node_cause = ending.blamed
    told = {
        "attempt": attempt,
        "ended": datetime.now(timezone.utc).replace(microsecond=0).isoformat(),
        "outcome": ending.outcome.value,
        "code": ending.code,
        "cause": ending.ended.cause.value,
        "reason": ending.reason,
        "clues": ending.clues,
        "by": _by(ending, signals),
        "checkpoint": str(saved.folder) if saved else None,
        "iteration": saved.iteration if saved else None,
        "node": node,
        "node_cause": node_cause,
    }
    with suppress(OSError):
        record.append(run, record.ENDINGS, told)


def _by(ending: Ending, signals: Sequence[str]) -> str:
    """Who ended it: the launcher on a signal, another launcher, the engine, …, the run itself."""
    cause = ending.ended.cause
    if cause is not EndCause.ITSELF:
        return str(cause.value)
    if signals:
        return f"the launcher, on {', '.join(signals)}"
    if ending.asked:
        return "launcher stop"
    if ending.stalled or ending.guarded:
        return "the watchdog" if ending.stalled else "the guard"
    return "somebody outside" if ending.outcome is Outcome.STOPPED else "itself"
