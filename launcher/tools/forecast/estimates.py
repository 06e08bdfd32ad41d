"""Forecasts of run files and of records: from what was asked for to what it will take."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from launcher.base.errors import EngineError, UsageError, nearest
from launcher.runs.checks import gather
from launcher.runs.checks.machine import GB, Gpu
from launcher.runs.follow.assemble import PlannedRun, assemble, counted, new_stamp
from launcher.runs.plan.job import Backend
from launcher.runs.records import record, throughput
from launcher.runs.runfile.origins import RunRequest
from launcher.tools.forecast import layouts, site, usage
from launcher.tools.forecast import work as works
from launcher.tools.forecast.forecast import Forecast, Hardware, forecast, with_others
from launcher.tools.forecast.usage import RunFact


def card(name: str) -> Gpu:
    """A GPU as it is published. Raises UsageError where nothing is."""
    found = throughput.card(name)
    if found is None:
        known = [one.alias for one in throughput.cards() if one.alias]
        raise UsageError(f"--gpu {name}: unknown card", nearest(name, known))
    return Gpu(0, "", name, int(found.gb * GB), 0, found.capability, "")


def of_request(
    asked: RunRequest, chosen: Backend, gpu: str = "", network: float | None = None
) -> tuple[Forecast, PlannedRun]:
    """The forecast of what is asked for, on a published card where one is named, and its plan.

    Raises UsageError, EngineError.
    """
    visible: Sequence[Gpu] = [card(gpu)] if gpu else ()
    with suppress(EngineError):  # where that matters, assemble raises it
        visible = visible or gather.visible(counted(asked.config, chosen), chosen)
    planned = assemble(asked, chosen, new_stamp(), dry=True, visible=visible)
    found = of_planned(planned, chosen, visible, network)
    if gpu and found.work.on_cpu:
        why = f"what it takes on {gpu}: with gpus: 0 it runs on the CPU"
        found = replace(found, unknown=(why, *found.unknown))
    return found, planned


def of_planned(
    planned: PlannedRun, chosen: Backend, visible: Sequence[Gpu], network: float | None = None
) -> Forecast:
    """The forecast of a plan; `visible` are its GPUs, none where they aren't known."""
    resolved, plan = planned.resolved, planned.plan
    one = min(visible, key=lambda gpu: gpu.total, default=None)
    work = works.of_resolved(resolved)
    machine = Hardware("", network=network)
    if work.on_cpu and not chosen.scheduled:
        machine = replace(machine, place=_this_machine())
    elif one:
        machine = Hardware(one.name, one.name, one.total, one.capability, network)
    known = site.earlier(machine.place)
    seen = not chosen.scheduled or chosen.shares_files
    found = forecast(work, machine, known, plan.checkpoints if seen else None)
    return with_others(found, layouts.nearest(resolved, machine, known))


def _this_machine() -> str:
    host = {"name": platform.uname().node, "cpus": len(os.sched_getaffinity(0))}
    return usage.place({"host": host}, on_cpu=True)


def of_record(run: str, fact: RunFact, known: Iterable[RunFact] | None = None) -> Forecast:
    """The forecast that a run of this site had before its start: by the runs before it.

    `known` are the runs to look for those among, in place of those that there are records of.
    """
    kept = record.read(run, record.FACTS) or {}
    gpus = (kept.get("machine") or {}).get("gpus") or ()
    one = min(gpus, key=lambda gpu: gpu["total"], default=None)
    able = tuple(one["capability"]) if one and one.get("capability") else None
    name = "" if fact.work.on_cpu else fact.place
    machine = Hardware(fact.place, name, one["total"] if one and name else 0, able)
    return forecast(fact.work, machine, site.earlier(fact.place, fact.created, known))
