"""On NaN, a spike or a flat loss: warns, stops, or rewinds to a checkpoint."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from launcher.agent.checkpoints import folders
from launcher.agent.diverged import Divergence
from launcher.agent.words import DIVERGED, SAYS
from launcher.base.errors import UsageError
from launcher.base.names import LABEL
from launcher.runs.follow import find
from launcher.runs.follow.listener import Listener
from launcher.runs.plan.job import Backend, ConnectionLost, Job
from launcher.runs.records import plot, record
from launcher.runs.records.alarms import FLAT, MEASURES, NAN, SPIKE, Alarm, Detector
from launcher.runs.records.ending import Ending, Outcome
from launcher.runs.records.metrics import ALARM, REWIND, Found, TrainingStep
from launcher.runs.runfile import config
from launcher.runs.runfile.origins import RunRequest

END = "end"
BACK = "rewind"

LOG_INTERVAL = 100
"""Our program's and Megatron's, where it isn't given."""

NOT_A_NUMBER = "the loss or a gradient isn't a number"
"""As the table of known failures calls it, where a program ends for it by itself."""


@dataclass
class LossGuard:
    """Listens to a job by what its watch has read, and acts on the first alarm that asks for it.

    interval: the iterations that a line of the log is about; end: asks the job to stop; show: has
    the live line show an alarm; alarm: what the run was ended for, or goes back for
    """

    job: Job
    attempt: int
    wanted: config.Guard
    detector: Detector
    interval: int
    tell: Callable[[str], None]
    show: Callable[[str], None]
    end: Callable[[], None]
    last: int
    divergence: Divergence
    alarm: Alarm | None = None
    action: str = ""
    come: list[TrainingStep] = field(default_factory=list)

    def see(self, found: Found) -> None:
        """Take what the log reports, to be judged when its lines are kept."""
        if isinstance(found, TrainingStep):
            self.come.append(found)

    def add(self, data: bytes, is_error: bool) -> None:
        """Judge what this piece of the output reported."""
        come, self.come = self.come, []
        before = self.alarm
        for step in come:
            for alarm in self.detector.judge(step):
                self._act(alarm)
            self.divergence.add(step.iteration, step.values)
            self.last = step.iteration
        if self.alarm is not before:
            threading.Thread(target=self._end, daemon=True).start()

    def _act(self, alarm: Alarm) -> None:
        asked = {NAN: self.wanted.on_nan, SPIKE: self.wanted.on_spike, FLAT: self.wanted.on_flat}
        action: str = asked[alarm.kind]
        if action == "ignore" or self.alarm:
            return
        self.tell(f"guard: {alarm}")
        self.show(f"{alarm.kind} at {alarm.iteration}")
        if action == BACK and rewinds(self.job.run) >= self.wanted.max_rewinds:
            self.tell(f"it was rewound {self.wanted.max_rewinds} times, and ends now")
            action = END
        self._keep(ALARM, alarm.iteration, alarm=alarm.kind, text=alarm.text, action=action)
        if action in (END, BACK):
            self.alarm, self.action = alarm, action
            self.tell(f"guard.on_{alarm.kind}: {action}")

    def _end(self) -> None:
        """End the job: at once where it goes back, as what it would save isn't gone on from."""
        with suppress(ConnectionLost, OSError):
            self.job.kill() if self.action == BACK else self.end()

    def _keep(self, kind: str, iteration: int, **more: object) -> None:
        told = {"kind": kind, "attempt": self.attempt, "iteration": iteration, **more}
        with suppress(OSError):
            record.append(self.job.run, record.METRICS, told)

    def settle(self, found: Ending) -> str:
        """Once the job has ended: put away what was saved since; where it goes back to, or "".

        A checkpoint is good where a step after it was: not one that is as new as the last good
        line. After a NaN none of the others is gone on from, even where the run was ended; but
        what it went on from itself stays where it doesn't go back.
        """
        if found.outcome is not Outcome.FAILED or found.asked:
            return ""
        if found.diverged and not self.alarm:
            self.alarm = Alarm(NAN, self.divergence.first, found.diverged)
        if not self.alarm and found.itself and _named(found) and self.wanted.on_nan == BACK:
            self._act(Alarm(NAN, self.last + self.interval, "the program ended because of it"))
        if not self.alarm or not (self.action == BACK or self.alarm.kind == NAN):
            return ""
        bad = [max(1, self.alarm.iteration - self.interval), self.alarm.iteration]
        try:
            self._reject(bad[0] - 1)
            if self.action != BACK:
                return ""
            newest = find.newest(self.job.labels)
        except OSError as error:
            self.tell(f"it can't be rewound: {error.filename}: {error.strerror}")
            return ""
        to = newest.iteration if newest else 0
        self._keep(REWIND, to, passed_over=bad)
        where = f"iteration {to}" if newest else "its beginning"
        return f"going back to {where}, past the batches of iterations {bad[0]} to {bad[1]}"

    def _reject(self, after: int) -> None:
        root, line = self.job.labels.get(f"{LABEL}checkpoints"), find.lineage_of(self.job.labels)
        if root and line:  # of several nodes the first one's launcher does it
            run = "" if self.action == BACK else self.job.run
            for path in folders.reject(Path(root), line, after, run):
                self.tell(f"a checkpoint was renamed: {path}")


def _named(found: Ending) -> bool:
    return NOT_A_NUMBER in [sign.failure.name for sign in found.explained.signs[:1]]


@contextmanager
def guarding(
    job: Job,
    attempt: int,
    tell: Callable[[str], None],
    show: Callable[[str], None],
    end: Callable[[], None],
) -> Iterator[Sequence[LossGuard]]:
    """The guard that the run's record asks for, if it does; it knows the attempts before."""
    wanted = record.find(job.run).asked().config.guard
    if {wanted.on_nan, wanted.on_spike, wanted.on_flat} == {"ignore"}:
        yield ()
        return
    plan = record.read(job.run, record.PLAN) or {}
    given = str(plan.get("options", {}).get("log_interval", ""))
    interval = int(given) if given.isdecimal() else LOG_INTERVAL
    detector = Detector(wanted.window, wanted.threshold)
    earlier = plot.continued(one for one in plot.read_metrics(job.run) if one["attempt"] < attempt)
    last = 0
    for each in (one for one in earlier if one["kind"] == plot.STEP):
        for measure in MEASURES:
            detector.remember(measure.field, each.get(measure.field))
        last = each["iteration"]
    after = (last, Divergence(bool(detector.known["loss"])))
    yield (LossGuard(job, attempt, wanted, detector, interval, tell, show, end, *after),)


def verdict(listeners: Sequence[Listener]) -> str:
    """What a guard among the listeners has ended the run for, "" where none has."""
    alarms = (one.alarm for one in listeners if isinstance(one, LossGuard))
    return next((str(alarm) for alarm in alarms if alarm), "")


def diverged(listeners: Sequence[Listener], output: str = "") -> str:
    """From where on a run's numbers were NaN to its end; "" where not, or where it is ignored.

    By the last of the output where only another node's launcher has the lines of the steps.
    """
    heard = re.search(f"{SAYS}{DIVERGED.format('([0-9]{1,18})')}", output)
    for one in listeners:
        if isinstance(one, LossGuard) and one.wanted.on_nan != "ignore":
            first = one.divergence.first = one.divergence.first or int(heard[1] if heard else 0)
            return DIVERGED.format(first) if first else ""
    return ""


def settle(listeners: Sequence[Listener], found: Ending) -> str:
    """Where a guard among the listeners has the run go back to, "" where none does."""
    return "".join(one.settle(found) for one in listeners if isinstance(one, LossGuard))


def rewinds(run: str) -> int:
    """How often a run has gone back."""
    return sum(each["kind"] == REWIND for each in plot.read_metrics(run))


def passed_over(run: str) -> set[int]:
    """The iterations whose batches a run has gone back past, 1 the first."""
    bad = [each["passed_over"] for each in plot.read_metrics(run) if each["kind"] == REWIND]
    return {number for first, last in bad for number in range(first, last + 1)}


def check_guard(asked: RunRequest, chosen: Backend, *, detach: bool) -> None:
    """Refuse a run that may go back where no launcher sees its checkpoints. Raises UsageError."""
    where, alone = asked.origin.place("guard"), chosen.every_node or chosen.scheduled
    instead = "Set guard.on_nan and guard.on_spike to warn or end."
    if detach:
        raise UsageError(f"{where}: with --detach, no launcher can rewind the run", instead)
    if not chosen.shares_files:
        raise UsageError(f"{where}: rewind needs checkpoints that can be seen from here", instead)
    if asked.config.nodes.count > 1 and not alone:
        raise UsageError(f"{where}: rewind needs one launcher that starts all nodes", instead)
