"""Makes what to ask for of a run's record: to go on with it, or to repeat it exactly."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from launcher.agent.checkpoints import folders, lineage
from launcher.base.errors import EngineError, PreflightError, UsageError
from launcher.base.settings import expanded
from launcher.runs.follow import find
from launcher.runs.follow.assemble import assemble, counted, new_stamp
from launcher.runs.payload import digest
from launcher.runs.plan.job import Backend
from launcher.runs.plan.resolved import processes_of
from launcher.runs.records import owner, provenance, record, repeat, resume
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin, Override, RunRequest, overridden


def resumed(text: str, chosen: Backend, overrides: list[Override]) -> tuple[RunRequest, list[str]]:
    """The request to go on with the run that `text` names, and lines to print.

    `overrides` may set the number of GPUs, or of processes on the CPU; the layout then follows.
    Raises UsageError where the run saved nothing, still goes on, or fits no such number.
    """
    from launcher.runs.follow import guard

    kept = record.find(text)
    with owner.following(kept.run) as nobody:
        known, silent = find.everywhere()
        for one in silent:
            if kept.backend in one.names and one.may_have_jobs:
                unknown = f"whether run {kept.run} still goes on can't be asked: {one}"
                raise EngineError(unknown, one.why.remedy)
        going_on = [job for _, job in known if job.run == kept.run and job.ended() is None]
        if going_on or not nobody:
            raise UsageError(
                f"run {kept.run} still goes on",
                f"Follow it with `launcher attach {kept.run}`, or stop it first.",
            )
    asked = kept.asked()
    _refuse_overwritten(kept, asked.config)
    config = resume.skipping(resume.from_newest(asked.config), guard.passed_over(kept.run))
    config = overridden(config, overrides)
    _refuse_finished(kept, config)
    processes = processes_of(config, counted(config, chosen))
    record.check_secrets(kept, config, os.environ)
    found = resume.on_processes(config, kept.processes, processes, was=asked.config)
    again = resume.upstreams(found.config, asked.config)
    notes = [*found.notes, *again.notes]
    if kept.payload != digest():
        notes.append("it continues with this launcher's runner and trainer, not with its own")
    return replace(asked, config=again.config, payload_digest=""), notes


def _refuse_finished(kept: record.Record, config: RunConfig) -> None:
    """Raise UsageError where the newest checkpoint is the last one: nothing is left to train."""
    save, last = config.checkpoint.save, resume.last_iteration(config.training)
    if not save or last is None:
        return
    root = Path(kept.cwd, expanded(save))
    try:
        newest = folders.newest_complete(root, lineage.of_run(root, kept.run))
    except OSError:  # another user's, or not on this machine
        return
    if newest and newest.iteration >= last:
        key = "train_samples" if config.training.train_iters is None else "train_iters"
        more = 2 * (getattr(config.training, key) or 0)
        raise UsageError(
            f"run {kept.run} has finished: {newest.folder} is iteration {newest.iteration} of "
            f"{last}",
            f"To train on: launcher resume {kept.run} --set training.{key}={more}",
        )


def _refuse_overwritten(kept: record.Record, config: RunConfig) -> None:
    """Raise UsageError where another line's checkpoint is the newest where the run has saved."""
    if config.nodes.rank or not config.checkpoint.save:
        return
    root = Path(kept.cwd, expanded(config.checkpoint.save))
    try:
        newest, own = folders.newest_complete(root), lineage.of_run(root, kept.run)
    except OSError:  # another user's: preflight or the run reports it
        return
    owner = lineage.owner(newest.folder) if newest else ""
    if newest and owner and own and owner != own:
        raise UsageError(
            f"run {kept.run}: {newest.folder} is run {owner}'s; this run would continue from it",
            f"Move run {owner}'s checkpoints away, and let {root / folders.TRACKER} name the "
            "iteration to go on from.",
        )


def repeated(text: str, chosen: Backend, *, force: bool) -> tuple[RunRequest, list[str]]:
    """The request to repeat the run that `text` names exactly, and lines to print.

    It saves into a folder of its own, and begins where that run began. Raises PreflightError,
    with all that is no longer the same, unless `force` is set.
    """
    from launcher.runs.checks import gather

    kept = record.find(text)
    asked = kept.asked()
    record.check_secrets(kept, asked.config, os.environ)
    then, plan = record.read(kept.run, record.FACTS), record.read(kept.run, record.PLAN)
    if then is None or plan is None:
        raise UsageError(f"run {kept.run}: an older launcher kept no facts to compare with")
    pinned = repeat.pinned(asked.config, then["image"], chosen)
    config, notes = repeat.aside(pinned, asked.cwd, began=bool(then["began"]))
    if pinned is not asked.config:
        notes.append(f"{then['image']['name']} now names another image; the first one is used")
    same = replace(asked, config=pinned, origin=Origin(f"run {kept.run}", {}, {}), tie=plan["tie"])
    unmoved = assemble(same, chosen, new_stamp()).plan
    asked = replace(same, config=config)
    again = assemble(asked, chosen, new_stamp()).plan
    machine = gather.machine(gather.engine_of(chosen), gpus=bool(again.gpus.count))
    lines = provenance.changed(then, provenance.facts_of(again, asked, chosen, machine))
    lines += repeat.differences(plan, provenance.kept_plan(unmoved))
    if lines and not force:
        told = [f"run {kept.run} can't be repeated exactly:", *(f"  {line}" for line in lines)]
        raise PreflightError("\n".join(told), "--force runs it anyway.")
    return asked, [*notes, *lines]
