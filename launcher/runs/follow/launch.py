"""Starts a run and follows it: preflight, record, attempts, ending."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from launcher.agent.checkpoints import folders, hold, lineage
from launcher.base.errors import LauncherError, UsageError
from launcher.base.files import ForeignFileError
from launcher.base.names import LABEL
from launcher.base.trust import require_own_links
from launcher.runs.follow import find, live, run_files
from launcher.runs.follow.assemble import PlannedRun, assemble, new_stamp
from launcher.runs.follow.listener import Listener
from launcher.runs.follow.live import OutputDetail, screened, tell
from launcher.runs.follow.supervise import supervise
from launcher.runs.payload import KEY
from launcher.runs.plan.job import Backend, Job
from launcher.runs.plan.plan import Plan, Stamp
from launcher.runs.plan.program import ProgramKind, program
from launcher.runs.records import owner, provenance, record
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import RunRequest

if TYPE_CHECKING:
    from launcher.runs.checks.machine import Machine

LISTEN = "launcher.runs.follow.listen"
"""All that listens to a run; there is nothing to hear before it has begun."""


def start(
    asked: RunRequest,
    chosen: Backend,
    *,
    detach: bool,
    preflight: bool,
    shown: OutputDetail = OutputDetail.USUAL,
) -> int:
    """Start the run and follow it to its end; the program's exit code, or 0 once detached.

    Raises UsageError, EngineError and PreflightError before anything is started.
    """
    refuse_options(asked, chosen, detach=detach)
    if array := chosen.tasks:
        return _start_array(asked, chosen, array, preflight=preflight)
    stamp = new_stamp()
    assembled = assemble(asked, chosen, stamp)
    asked = replace(asked, config=assembled.resolved.config)
    with screened(shown), ExitStack() as starting:
        live.screen.wait("checking")
        starting.enter_context(owner.alone())
        plan = record_plan(assembled, asked, chosen, preflight=preflight)
        where = plan.image if chosen.contained else "this environment"
        tell(f"run {plan.run} ({plan.name}) in {where}; record: {record.folder(plan.run)}")
        gc.freeze()  # what is imported stays, so it is looked at no more, not even at the end
        gc.enable()
        if detach:
            print(begin(chosen, plan, attach=False).run)
            return 0
        same = replace(asked, payload_digest=dict(plan.labels).get(LABEL + KEY, ""))
        attempts = Attempts(same, chosen, stamp, FirstAttempt(plan, starting))
        restarts = asked.config.max_restarts
        return supervise(chosen, attempts, restarts=restarts, listening=_listening).code


def record_plan(
    assembled: PlannedRun, asked: RunRequest, chosen: Backend, *, preflight: bool
) -> Plan:
    """The plan of a run that can work, once its folders are made and its record is kept."""
    plan = with_lineage(assembled.plan, asked, chosen)
    machine = prepare(replace(assembled, plan=plan), chosen, preflight=preflight)
    try:
        record.write(record.record_of(plan, asked, chosen.name))
        provenance.write_facts(plan, provenance.facts_of(plan, asked, chosen, machine))
    except (LauncherError, OSError):
        record.forget(plan.run)
        raise
    return plan


def _start_array(
    asked: RunRequest, chosen: Backend, array: Sequence[int], *, preflight: bool
) -> int:
    """Start a run for each number of an array, all at once, and print which they are."""
    plans = dict[int, Plan]()
    with owner.alone():
        try:
            for number in array:
                one = task(asked, number)
                assembled = assemble(one, chosen, new_stamp())
                one = replace(one, config=assembled.resolved.config)
                plans[number] = record_plan(assembled, one, chosen, preflight=preflight)
            for plan in plans.values():
                tidy(plan, chosen)
            started: Sequence[Job] = chosen.start_array(plans)
        except LauncherError:
            for plan in plans.values():
                record.forget(plan.run)
            raise
    for number, job in zip(array, started, strict=True):
        tell(f"task {number} is run {job.run}: Slurm job {job.handle}")
    print("".join(f"{job.run}\n" for job in started), end="")
    return 0


def task(asked: RunRequest, number: int) -> RunRequest:
    """What is asked for as a task of an array."""
    from launcher.runs.records import repeat

    return replace(asked, config=repeat.as_task(asked.config, number, asked.cwd))


def check_start(asked: RunRequest, chosen: Backend, *, detach: bool, preflight: bool) -> None:
    """Refuse what `start` would, as far as that needs no data. Raises as that does."""
    refuse_options(asked, chosen, detach=detach)
    for each in [task(asked, number) for number in chosen.tasks] or [asked]:
        assembled = assemble(each, chosen, new_stamp())
        plan = with_lineage(assembled.plan, each, chosen)
        if plan.checkpoints:
            _refuse_sharing(plan)
        if preflight and not chosen.scheduled:
            _preflight(assembled, chosen)


def refuse_options(asked: RunRequest, chosen: Backend, *, detach: bool) -> None:
    """Refuse what needs a launcher that follows the run, where there is none. Raises UsageError."""
    how = "slurm.array" if chosen.tasks else "--detach" if detach else ""
    if how and asked.tie:
        raise UsageError(f"{how} and --tie contradict each other", "Leave one of them out.")
    if how and asked.config.max_restarts:
        raise UsageError(
            f"with {how}, no launcher can restart the run",
            f"Leave {how} out and put the launcher itself in the background, or set "
            "max_restarts: 0; `launcher attach` then follows the run, and restarts it.",
        )
    if asked.config.guard.goes_back:
        from launcher.runs.follow import guard

        guard.check_guard(asked, chosen, detach=bool(how))


def _listening(job: Job) -> AbstractContextManager[Sequence[Listener]]:
    from launcher.runs.follow.listen import listening

    return listening(job)


def attach(text: str, shown: OutputDetail = OutputDetail.USUAL) -> int:
    """Follow a run that goes on, or went on, from its first line; its exit code."""
    chosen, job = find.job(text)
    try:
        kept = record.find(job.run)
    except UsageError:  # another user's or another cache's: it can be followed all the same
        tell(f"run {job.run} has no record here: it is only looked at, not stopped or removed")
        return supervise(chosen, lambda attempt: job, job=job, guest=True, shown=shown).code
    asked = kept.asked()
    chosen = chosen.configured(asked.config)
    restarts = asked.config.max_restarts
    try:
        record.check_secrets(kept, asked.config, os.environ)
    except UsageError as error:
        if restarts:
            tell(f"{error.problem}: it won't be started again")
        restarts = 0
    stamp = Stamp(job.run, job.labels.get(f"{LABEL}created", ""))
    attempts = Attempts(asked, chosen, stamp, None)
    return supervise(
        chosen, attempts, restarts=restarts, job=job, listening=_listening, shown=shown
    ).code


def prepare(assembled: PlannedRun, chosen: Backend, *, preflight: bool) -> Machine | None:
    """Check that the run can work, and make its folders. The machine, where it was looked at."""
    plan = assembled.plan
    for line in (*assembled.notes, *(f"warning: {line}" for line in assembled.ignored)):
        tell(line)
    if plan.checkpoints:
        _refuse_sharing(plan)
    if chosen.scheduled and not chosen.shares_files:  # the run's files can't be seen from here
        return None
    run_files.require(plan)
    machine = _preflight(assembled, chosen) if preflight and not chosen.scheduled else None
    _make_folders(plan)
    return machine


def _make_folders(plan: Plan) -> None:
    """Make those that the run writes to, of which one may be in the folder of its record."""
    try:
        with suppress(OSError):  # reported when the record is written
            record.make(plan.run)
        run_files.prepare(plan)
    except LauncherError:
        record.forget(plan.run)
        raise


def _preflight(assembled: PlannedRun, chosen: Backend) -> Machine:
    """Look at the machine, warn of what is doubtful, refuse what can't work: PreflightError."""
    from launcher.base.settings import settings
    from launcher.runs.checks import checks, gather
    from launcher.runs.follow import ask_image

    plan, resolved, row = assembled.plan, assembled.resolved, None
    if (tag := resolved.config.image.tag) and chosen.contained and plan.gpus.count:
        from launcher.images.matrix.matrix_file import load_matrix

        row = load_matrix().rows.get(tag)
    machine = gather.gather(resolved.config, plan, gather.engine_of(chosen))
    found = checks.preflight(resolved, plan, machine, row.cuda if row else None)
    if not any(finding.refuse for finding in found):
        found += ask_image.ask_image(plan, machine, chosen, settings().cache)
    checks.enforce(found)
    return machine


def _refuse_sharing(plan: Plan) -> None:
    """Two runs that save to one folder would overwrite each other's checkpoints.

    Nodes by hand share it, on one machine too. A run that this launcher can't list, as another
    user's, holds the folder itself.
    """
    node = f"{LABEL}node"
    for _, job in find.jobs():
        if job.labels.get(node) != dict(plan.labels).get(node):
            continue
        taken = job.labels.get(f"{LABEL}checkpoints")
        same = taken and os.path.realpath(taken) == os.path.realpath(plan.checkpoints or "")
        if same and job.run != plan.run and job.ended() is None:
            raise UsageError(
                f"checkpoint.save: {plan.checkpoints} is being saved to by run {job.run}",
                f"Stop that one first (launcher stop {job.run}), or set another folder.",
            )
    if plan.checkpoints and dict(plan.labels).get(node, "0") == "0":
        try:
            require_own_links(Path(plan.checkpoints))
            if other := hold.living(Path(plan.checkpoints)):
                raise UsageError(
                    f"checkpoint.save: {plan.checkpoints} is in use: {other} saves there",
                    "Stop that run first, or set another folder.",
                )
        except ForeignFileError as error:
            raise UsageError(f"checkpoint.save: {error.filename}: {error.strerror}") from None
        except OSError:  # another user's: the run itself looks again
            pass


def with_lineage(plan: Plan, asked: RunRequest, chosen: Backend) -> Plan:
    """The plan, with a label that says in which line of runs it saves, where that isn't its own.

    Raises UsageError where it would come upon another run's checkpoints. Of several nodes the
    first one's launcher looks.
    """
    request = lineage.save_request(dict(plan.env))
    if not (request and plan.checkpoints and chosen.shares_files) or asked.config.nodes.rank:
        return plan
    root = Path(plan.checkpoints)
    try:
        line = folders.lineage_of(root, plan.run, on=request.on)
        why = "" if request.overwrite else folders.refusal(root, line, on=request.on)
    except OSError:  # another user's: preflight or the run reports it
        return plan
    if why:
        raise UsageError(
            f"{asked.origin.place('checkpoint.save')}: {why}", _remedy(asked.config, request.on)
        )
    more = [(f"{LABEL}line", line)] if line != plan.run else []
    return replace(plan, labels=tuple(sorted([*plan.labels, *more])))


def _remedy(config: RunConfig, on: bool) -> str:
    """What to do about another run's checkpoints, for one that goes `on` from what is there."""
    over = "checkpoint.save_overwrite: true saves beside them, and replaces equal iterations."
    checkpoint = config.checkpoint
    if checkpoint.finetune and checkpoint.load:
        return f"To finetune, which begins at iteration 0, save to another folder; {over}"
    if on:
        return f"Move it away, or save to another folder; {over}"
    return (
        f"To go on with them, --set checkpoint.load={checkpoint.save}; to begin anew, save to "
        f"another folder; {over}"
    )


def tidy(plan: Plan, chosen: Backend) -> None:
    """Set the run's checkpoints aside that aren't complete: Megatron 0.9 won't save where one lies.

    All that refuses the run comes before. Several nodes share the folder, so the first one's
    launcher does it. Raises UsageError.
    """
    line = find.lineage_of(dict(plan.labels))
    if not (line and plan.checkpoints and chosen.shares_files):
        return
    try:
        for path in folders.set_aside(Path(plan.checkpoints), line):
            tell(f"an incomplete checkpoint was set aside: {path}")
    except OSError as error:
        raise UsageError(f"checkpoint.save: {error.filename}: {error.strerror}") from error


def begin(chosen: Backend, plan: Plan, *, attach: bool) -> Job:
    """Start a run's first attempt; one that doesn't start leaves no record."""
    try:
        tidy(plan, chosen)
        return chosen.start(plan, attach=attach)
    except LauncherError:
        record.forget(plan.run)
        raise


@dataclass(frozen=True)
class FirstAttempt:
    """The first attempt's plan, and what is held until it has started."""

    plan: Plan
    starting: ExitStack


@dataclass(frozen=True)
class Attempts:
    """Starts a run's attempts: the first as it was asked for, the others from what it saved."""

    asked: RunRequest
    chosen: Backend
    stamp: Stamp
    first: FirstAttempt | None

    def __call__(self, attempt: int) -> Job:
        """Start an attempt, and show what is waited for meanwhile and then."""
        live.screen.wait(f"starting the {'container' if self.chosen.contained else 'processes'}")
        job = self._start(attempt)
        trains = program(self.asked.config.program).kind is not ProgramKind.SCRIPT
        live.screen.wait("importing torch" if trains else "")
        return job

    def _start(self, attempt: int) -> Job:
        if attempt == 0 and self.first:
            # Read while the engine starts it, which takes longer.
            Thread(target=import_module, args=(LISTEN,), daemon=True).start()
            with self.first.starting:
                return begin(self.chosen, self.first.plan, attach=True)
        with owner.alone():
            plan = self._again()
            labels = sorted([*plan.labels, (f"{LABEL}attempt", str(attempt))])
            return self.chosen.start(replace(plan, labels=tuple(labels)), attach=True)

    def _again(self) -> Plan:
        """The plan that goes on from the newest complete checkpoint; from the start without one."""
        from launcher.runs.follow import guard
        from launcher.runs.records import resume

        config = resume.skipping(self.asked.config, guard.passed_over(self.stamp.run))
        asked, save = replace(self.asked, config=config), config.checkpoint.save
        if save and not self.chosen.shares_files:
            if config.checkpoint.load not in (None, save):  # it would begin from there again
                raise UsageError(
                    "checkpoint.load: what the run saved on the engine's machine can't be seen "
                    "from here, so it isn't started again",
                    "When it has saved, set checkpoint.load to the folder that it saves to.",
                )
            asked = replace(asked, config=resume.from_newest(config))  # the program finds it
        elif save:
            plan = assemble(asked, self.chosen, self.stamp).plan
            assert plan.checkpoints
            _refuse_sharing(plan)
            plan = with_lineage(plan, asked, self.chosen)
            tidy(plan, self.chosen)
            if newest := find.newest(dict(plan.labels)):
                tell(f"going on from {newest.folder}")
                asked = replace(asked, config=resume.from_newest(config))
        return with_lineage(assemble(asked, self.chosen, self.stamp).plan, asked, self.chosen)
