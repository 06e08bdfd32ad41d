"""What a run will take: memory, a step, hours, checkpoints, disk and money, each with its range."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

from launcher.base.settings import settings
from launcher.runs.checks import memory
from launcher.runs.records import throughput
from launcher.tools.forecast import site, timing, usage
from launcher.tools.forecast.site import Range, StepTime
from launcher.tools.forecast.timing import GpuRates
from launcher.tools.forecast.usage import RunFact
from launcher.tools.forecast.work import Work

PASS = 1 / 3
"""Of a step's time, that of an evaluation's iteration: it has no way back, which is two thirds."""


NOTHING = Range(0, 0, 0)

MEMORY_OFF = {False: 0.07, True: 0.1}
"""How far memory may be off, either way, of dense models and of those with experts, whose tokens
aren't spread evenly: the dense ones of bench/gpu/runs.yaml were within it."""


MEMORY_SOURCE = "the model's sizes (arXiv:2205.05198)"
FROM_RECORDS = "earlier runs here"


@dataclass(frozen=True)
class Hardware:
    """What a run is to run on: `place` as facts.place has it; the card's name, "" on the CPU.

    total: bytes of a GPU's memory, 0 where it isn't known; network: GB/s for each GPU
    """

    place: str
    card: str = ""
    total: int = 0
    capability: tuple[int, int] | None = None
    network: float | None = None

    def rates(self, work: Work, known: Sequence[RunFact]) -> GpuRates | None:
        """The card's published rates, with links as the newest of the `known` runs measured them;
        None where there are none, as on the CPU."""
        if work.on_cpu or not self.card:
            return None
        links = {reach: one.links[reach] for reach, one in site.measured_links(known).items()}
        return timing.published(self.card, work.precision, self.network, links)


@dataclass(frozen=True)
class OtherLayout:
    """Another layout that fits: what to set, bytes on a GPU, and a step's time if that is known."""

    sets: dict[str, object]
    bytes: int
    step: StepTime | None


@dataclass(frozen=True)
class Forecast:
    """What a run will take; None, or nothing, is what can't be known, and `unknown` says why.

    hours: from its start to its end; checkpoint: bytes of one; saving: seconds of one;
    disk: bytes of all that it keeps; free: bytes where it saves; price: of a GPU's hour
    """

    work: Work
    machine: Hardware
    memory: memory.MemoryEstimate | None = None
    step: StepTime | None = None
    tokens: int = 0
    hours: Range | None = None
    checkpoint: int | None = None
    saving: Range | None = None
    disk: int | None = None
    free: int | None = None
    price: float | None = None
    others: tuple[OtherLayout, ...] = ()
    unknown: tuple[str, ...] = ()
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def memory_range(self) -> Range | None:
        """Bytes on a GPU."""
        if not (self.memory and self.work.shape):
            return None
        off, total = MEMORY_OFF[bool(self.work.shape.experts)], self.memory.total
        return Range(total, total * (1 - off), total * (1 + off))

    @property
    def tokens_per_s(self) -> Range | None:
        """Of all GPUs together."""
        if not (self.step and self.work.shape):
            return None
        tokens = 1000 * self.work.batch * self.work.shape.sequence
        return Range(tokens / self.step.ms, tokens / self.step.most, tokens / self.step.least)

    @property
    def gpu_hours(self) -> Range | None:
        """None on the CPU."""
        world = 0 if self.work.on_cpu else self.work.where.world
        return self.hours.times(world) if self.hours and world else None


def forecast(
    work: Work, machine: Hardware, known: Sequence[RunFact], folder: str | None = None
) -> Forecast:
    """The forecast of a run by what is published and by earlier runs on such a machine.

    `folder` is where it saves, as seen here.
    """
    card, unknown = machine.rates(work, known), list[str]()
    needed = None if work.on_cpu else work.memory(machine.capability)
    step = site.step(work, card, known)
    if work.shape is None:
        unknown.append("the model's sizes aren't known: no memory, no disk, no time by rates")
    elif step is None:
        unknown.append(_why_no_time(work, machine, card))
    if any(name.startswith("fp8") for name in work.options) and step and not step.measured:
        unknown.append("what FP8 gains: it is counted as bf16")
    size = memory.bytes_of_checkpoint(work.program, work.options, work.where)
    saves = bool(work.options.get("save"))
    saving = _saving(work, size, known) if saves and size else None
    if saves and saving is None:
        unknown.append("the time of a save: none was measured here, so hours are without saves")
    sources = {"memory": MEMORY_SOURCE} if needed else {}
    sources |= {"step": step.source} if step else {}
    if step and not step.measured:
        used = site.links_of(work, card, known, machine.network is not None)
        sources |= {"links": used} if used else {}
    sources |= {"checkpoints": "the model's sizes"} if size and saves else {}
    sources |= {"saves": FROM_RECORDS} if saving else {}
    sources |= {"start, evaluations, end": FROM_RECORDS} if known else {}
    hours = _hours(work, step, saving, known) if step and work.steps else None
    if hours and not known:
        unknown.append("how long a start and compiling take here: hours are without them")
    kept = min(work.keep, work.saves) if work.keep else work.saves
    return Forecast(
        work=work,
        machine=machine,
        memory=needed,
        step=step,
        tokens=work.samples * (work.shape.sequence if work.shape else 0),
        hours=hours,
        checkpoint=size if saves else None,
        saving=saving,
        disk=size * kept if size and saves and kept else None,
        free=_free(folder) if folder else None,
        price=None if work.on_cpu else price(machine.card),
        unknown=tuple(unknown),
        sources=sources,
    )


def _why_no_time(work: Work, machine: Hardware, card: GpuRates | None) -> str:
    """Why there is no time of a step."""
    if work.on_cpu:
        return "the time of a step: nothing is published of a CPU, and no run here was like it"
    if not machine.card:
        return (
            "the time of a step, and what is free: the card isn't known: forecast --gpu h100-80gb"
        )
    if card is None:
        return f"the time of a step: not enough is published here of {machine.card}"
    if work.nodes > 1 and card.network is None:
        return "the time of a step: the nodes' network isn't known: forecast --network GB/S"
    return "the time of a step: the options have no batch"


def _saving(work: Work, size: int, known: Sequence[RunFact]) -> Range | None:
    """Seconds of a save by those of earlier runs: by their bytes, or as long whatever they are."""
    times, same = list[float](), list[float]()
    for one in known:
        bytes_of = memory.bytes_of_checkpoint(one.work.program, one.work.options, one.work.where)
        if one.saves and bytes_of and one.whole:
            each = one.seconds[usage.SAVES] / one.saves
            same += [each] if one.work.key == work.key else []
            times += [each, each * size / bytes_of]
    times = same or times
    return Range(median(times), min(times), max(times)) if times else None


def _hours(work: Work, step: StepTime, saving: Range | None, known: Sequence[RunFact]) -> Range:
    """Hours of the whole run: start, steps, evaluations, saves, end."""
    steps = work.steps
    pace = median(one.mean_ms for one in step.measured) if step.measured else step.ms
    same = tuple(one for one in step.measured if one.whole)
    known = tuple(one for one in known if one.whole)
    seconds = Range(pace, min(pace, step.least), max(pace, step.most)).times(steps / 1000)
    if same and any(one.evaluations for one in same):
        found = [
            one.seconds[usage.EVALUATIONS] / one.evaluations for one in same if one.evaluations
        ]
        each = Range(median(found), min(found), max(found))
    else:
        ms = step.range
        each = ms.times(work.number("eval_iters", 100) * PASS / 1000)
    inner = max(0, work.evaluations - 1) if same else work.evaluations
    seconds += each.times(inner)
    every = work.number("save_interval")
    saves = (steps - 1) // every if every and same else work.saves
    seconds += saving.times(saves) if saving else NOTHING
    for part in (usage.START, usage.WARM_UP, usage.END):
        found = [one.seconds[part] for one in same or known]
        seconds += Range(median(found), min(found), max(found)) if found else NOTHING
    return seconds.times(1 / 3600)


def _free(folder: str) -> int | None:
    """Bytes that are free where a folder is, or will be."""
    for path in (Path(folder), *Path(folder).parents):
        try:
            found = os.statvfs(path)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def price(card: str) -> float | None:
    """What an hour of a GPU costs by the settings; None where they don't say it."""
    found = throughput.card(card) if card else None
    prices = settings().prices
    return prices.get(card, prices.get(found.alias) if found else None)


def with_others(found: Forecast, others: Sequence[OtherLayout]) -> Forecast:
    """The forecast with other layouts beside it."""
    return replace(found, others=tuple(others))
