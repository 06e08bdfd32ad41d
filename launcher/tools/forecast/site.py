"""What earlier runs of this site took, and the time of a step by them or by published rates."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from math import exp, log
from statistics import median

from launcher.base.settings import settings
from launcher.runs.records import record, throughput
from launcher.tools.forecast import timing, usage
from launcher.tools.forecast.timing import GpuRates, StepCost
from launcher.tools.forecast.usage import RunFact
from launcher.tools.forecast.work import ALIKE as FIRST
from launcher.tools.forecast.work import Work

MOST_RUNS, MOST_BYTES, LARGE = 30, 3 << 19, 1 << 18
"""Of earlier runs, the newest, and of their metrics, in all and of one: a forecast takes no third
of a second."""

NEAREST = 3
"""Runs with other work by which a step is scaled: those whose steps are the most alike."""

FEW = 3
"""Kinds of work with which one can be left out, to see how far the others are off."""

BEYOND = 1.25
"""By how much another kind of work may be further off than those that were left out."""

UNEVEN = "; tokens are taken to be spread evenly over experts, and at most all choose the same ones"
ALIKE = (
    f"; in the first {FIRST} steps on a text all tokens are taken to choose the same "
    "experts, and then to be spread evenly"
)

NAMES = {timing.MACHINE: "within a machine", timing.NETWORK: "between machines"}
AS_PUBLISHED = f"{timing.LINK:.0%} of what is published".replace("%", " %")

UNSURE = {False: 2.0, True: 4.0}
"""How far off, either way, a step may be that is scaled from fewer: on GPUs, and on the CPU.

On two shared cores five runs of tiny models, each left out, were 0.26 to 2.93 of it.
"""


@dataclass(frozen=True)
class Range:
    """A number, with the least and the most that it may be."""

    value: float
    least: float
    most: float

    def __add__(self, other: Range) -> Range:
        return Range(self.value + other.value, self.least + other.least, self.most + other.most)

    def times(self, factor: float) -> Range:
        """It, so many times."""
        return Range(self.value * factor, self.least * factor, self.most * factor)


@dataclass(frozen=True)
class StepTime:
    """ms of a step, at least and at most; where it is from; its parts by the model, if known.

    measured: the earlier runs of the same work
    """

    ms: float
    least: float
    most: float
    source: str
    cost: StepCost | None = None
    measured: tuple[RunFact, ...] = ()

    @property
    def range(self) -> Range:
        """ms, at least and at most."""
        return Range(self.ms, self.least, self.most)


def earlier(place: str, before: str = "", known: Iterable[RunFact] | None = None) -> list[RunFact]:
    """What runs on such a machine or card took, newest first; those created before a time alone.

    `known` are the runs to choose from, in place of those that there are records of.
    """
    every = read() if known is None else known
    some = [one for one in every if not before or one.created < before]
    return [one for one in some if _is_same(one.place, place)] if place else []


def _is_same(one: str, other: str) -> bool:
    """Whether two names are of one card, or one machine."""
    found = throughput.card(one)
    return one == other or (found is not None and found == throughput.card(other))


def read() -> Iterator[RunFact]:
    """What the newest runs took, as many as a forecast has time for."""
    left = MOST_BYTES
    for run, _, size in islice(newest(), MOST_RUNS):
        left -= min(size, LARGE)
        if left < 0:
            return
        if took := usage.of_run(run, LARGE if size > LARGE else 0):
            yield took


def newest() -> list[tuple[str, float, int]]:
    """The runs that have metrics, those first that changed last: when that was, and their bytes."""
    folder, found = str(settings().runs), list[tuple[str, float, int]]()
    with suppress(OSError), os.scandir(folder) as entries:
        for one in entries:
            with suppress(OSError):
                about = os.stat(f"{one.path}/{record.METRICS}")
                found.append((one.name, about.st_mtime, about.st_size))
    return sorted(found, key=lambda run: -run[1])


def measured_links(known: Sequence[RunFact]) -> dict[str, RunFact]:
    """The newest runs that measured links within a machine, and between machines."""
    return {reach: one for one in reversed(known) for reach in one.links}


def links_of(work: Work, card: GpuRates | None, known: Sequence[RunFact], given: bool) -> str:
    """The rates of the links that a run uses, and what they are from; "" where it uses none.

    `given`: whether that between machines was asked for.
    """
    found, told = measured_links(known), list[str]()
    for reach, uses in (
        (timing.MACHINE, work.where.world > work.nodes),
        (timing.NETWORK, work.nodes > 1),
    ):
        rate = card and (card.link if reach == timing.MACHINE else card.network)
        source = AS_PUBLISHED if reach not in found else f"measured by run {found[reach].run}"
        if reach == timing.NETWORK and given:
            source = "by --network"
        elif reach in found:
            rate = found[reach].links[reach]
        if uses and rate:
            told.append(f"{rate:.3g} GB/s {NAMES[reach]}, {source}")
    return "; ".join(told)


def step(work: Work, card: GpuRates | None, known: Sequence[RunFact]) -> StepTime | None:
    """The time of a step by earlier runs, else by published rates; None where neither is there."""
    cost = timing.step(work, card or _cpu(work, known)) if card or work.on_cpu else None
    same = tuple(one for one in known if one.work.key == work.key)
    if same:
        ms = median(one.ms for one in same)
        least, most = min(one.spread[0] for one in same), max(one.spread[1] for one in same)
        told = f"{_runs(len(same))} of the same work here"
        return StepTime(ms, min(least, ms), max(most, ms), told, cost and _shown(cost, work), same)
    if cost is None:
        return None
    if found := _scaled(work, cost, card, known):
        return found
    if card is None:
        return None
    least, most = timing.off(work, card.name, cost)
    kind = timing.kind(work, cost)
    off = "{:.2f} to {:.2f}".format(*timing.OFF[kind])
    where = "published runs" if kind in timing.PUBLISHED_ON else "runs on H100s and H200s"
    told = f"published rates of the card; such forecasts were {off} of what {where} took"
    if not timing.is_known(work, card.name, cost):
        told += ", and this one is beyond those: a prediction"
    told += _routing(cost)
    even = cost.ms - cost.uneven
    return StepTime(cost.ms, even / most, cost.ms / least + cost.worst, told, cost)


def _routing(cost: StepCost) -> str:
    """How tokens are taken to be spread over experts; "" where that makes no difference."""
    return ALIKE if cost.uneven else UNEVEN if cost.worst else ""


def _runs(count: int) -> str:
    return "an earlier run" if count == 1 else f"{count} earlier runs"


def _cpu(work: Work, known: Sequence[RunFact]) -> GpuRates:
    """Rates of a process on the CPU, whose cores all share."""
    share, found = 1 / work.where.world, measured_links(known)
    links = [found[at].links[at] if at in found else 1.0 for at in (timing.MACHINE, timing.NETWORK)]
    return GpuRates("CPU", timing.CPU_TFLOPS * share, timing.CPU_MEMORY * share, *links)


def _shown(cost: StepCost, work: Work) -> StepCost | None:
    """The parts; on the CPU they mean nothing alone."""
    return None if work.on_cpu else cost


def _scaled(
    work: Work, cost: StepCost, card: GpuRates | None, known: Sequence[RunFact]
) -> StepTime | None:
    """The model's time, scaled by what runs with other work took beside what it says of them."""
    alike = [one for one in known if timing.starts(one.work) == timing.starts(work)]
    ratios = dict[
        object, tuple[float, float]
    ]()  # by work: the model's ms, and what it took of that
    for one in alike:
        found = timing.step(one.work, card or _cpu(one.work, known))
        if found and one.work.key not in ratios:
            ratios[one.work.key] = found.ms, one.ms / found.ms
    if not ratios:
        return None
    pairs = [*ratios.values()]
    factor = _factor(cost.ms, pairs)
    left_out = [
        _factor(ms, [*pairs[:at], *pairs[at + 1 :]]) / took
        for at, (ms, took) in enumerate(pairs)
        if len(pairs) >= FEW
    ]
    unsure = UNSURE[work.on_cpu]
    low, high = (min(left_out), max(left_out)) if left_out else (1 / unsure, unsure)
    low, high = (min(low, 1) / BEYOND, max(high, 1) * BEYOND) if left_out else (low, high)
    told = f"{_runs(len(alike))} with other work here"
    told += f"; each left out, the others were {low:.2f} to {high:.2f} of it" if left_out else ""
    told += "" if left_out else f", so that it may be {unsure:g} times off"
    told += _routing(cost)
    ms, even, more = (each * factor for each in (cost.ms, cost.ms - cost.uneven, cost.worst))
    return StepTime(ms, even / high, ms / low + more, told, _shown(cost, work))


def _factor(ms: float, pairs: Sequence[tuple[float, float]]) -> float:
    """What the nearest of (the model's ms, what was taken of that) took, as a weighted mean."""
    near = sorted(pairs, key=lambda pair: abs(log(pair[0] / ms)))[:NEAREST]
    weights = [1 / (0.1 + abs(log(pair[0] / ms))) for pair in near]
    summed = sum(weight * log(pair[1]) for weight, pair in zip(weights, near, strict=True))
    return exp(summed / sum(weights))
