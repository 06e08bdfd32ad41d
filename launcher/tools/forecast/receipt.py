"""What a run took, beside what it was forecast to take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from launcher.base.screen import printable
from launcher.runs.checks.machine import GB
from launcher.tools.forecast import estimates, forecast_text, site, usage
from launcher.tools.forecast.forecast import Forecast, price
from launcher.tools.forecast.usage import RunFact

NEWEST = 100
"""Runs whose receipts the page of runs has."""

LARGEST = 16 << 20
"""Bytes of metrics of which the page makes a receipt."""

LEAST = 0.001
"""Of a run's time, what is named."""

JOULES = 3.6e6
"""Of a kilowatt-hour."""


@dataclass(frozen=True)
class Receipt:
    """A run's fact and the forecast that it had before its start, by the runs before it."""

    fact: RunFact
    forecast: Forecast

    @property
    def gpus(self) -> int:
        """Of all nodes; 0 on the CPU."""
        return 0 if self.fact.work.on_cpu else self.fact.work.where.world

    @property
    def parts(self) -> dict[str, float]:
        """Where its seconds went, the largest first."""
        found = sorted(self.fact.seconds.items(), key=lambda part: -part[1])
        return {name: seconds for name, seconds in found if seconds > LEAST * self.fact.total}


def of_run(run: str) -> Receipt | None:
    """The receipt of a run; None where its record doesn't say what it took."""
    if fact := usage.of_run(run):
        with suppress(*usage.FOREIGN):
            return Receipt(fact, estimates.of_record(run, fact))
    return None


class Receipts:
    """The receipts of the newest runs as text; what hasn't changed since isn't made again."""

    def __init__(self) -> None:
        self._facts: dict[str, tuple[tuple[float, int], RunFact | None]] = {}
        self._lines: dict[str, tuple[object, list[str]]] = {}

    def read(self) -> dict[str, list[str]]:
        """Lines by run; a run whose record says something odd has none."""
        before, self._facts = self._facts, {}
        for run, when, size in islice(site.newest(), NEWEST):
            kept = before.get(run)
            if not kept or kept[0] != (when, size):
                took = usage.of_run(run) if size <= LARGEST else None
                kept = (when, size), took
            self._facts[run] = kept
        known = [fact for _, fact in self._facts.values() if fact]
        was, self._lines = self._lines, {}
        for fact in known:
            earlier = [one for one in known if one.created < fact.created][: site.MOST_RUNS]
            stamp = self._facts[fact.run][0], [one.run for one in earlier]
            if (made := was.get(fact.run)) and made[0] == stamp:
                self._lines[fact.run] = made
                continue
            with suppress(*usage.FOREIGN):
                found = Receipt(fact, estimates.of_record(fact.run, fact, earlier))
                self._lines[fact.run] = stamp, [*lines(found)]
        return {run: text for run, (_, text) in self._lines.items()}


def lines(found: Receipt) -> Iterator[str]:
    """The receipt as text: fact beside forecast, then where the time went."""
    fact, expected = found.fact, found.forecast
    on = printable(fact.place) or "machines that its record doesn't name"
    world, kind = fact.work.where.world, ("GPU", "s") if found.gpus else ("process", "es")
    yield f"run {fact.run}: {world} {kind[0]}{kind[1] * (world > 1)}, {on}"
    step = expected.step
    foreseen = (
        forecast_text.span(step.range, partial(forecast_text.ms, like=step.ms))
        if step
        else "not known"
    )
    yield _row("step", forecast_text.ms(fact.ms), foreseen, step.ms / fact.ms if step else None)
    if fact.allocated and expected.memory:
        total = expected.memory.total - expected.memory.overhead
        taken, foreseen = f"{fact.allocated / GB:.1f} GB", f"{total / GB:.1f} GB, CUDA's own aside"
        yield _row("memory", taken, foreseen, total / fact.allocated)
    hours, done = expected.hours, fact.iterations / (fact.work.steps or fact.iterations or 1)
    taken = forecast_text.duration(fact.total / 3600)
    if hours and done >= 1:
        ratio = 3600 * hours.value / fact.total
        foreseen = forecast_text.span(hours, partial(forecast_text.duration, like=hours.value))
        yield _row("time", taken, foreseen, ratio)
    else:
        why = (
            f"of the whole {forecast_text.span(hours, forecast_text.duration)}"
            if hours
            else "not known"
        )
        yield _row("time", f"{taken}, {done:.0%} of its steps".replace("%", " %"), why, None)
    yield f"  {fact.iterations} steps, {forecast_text.count(fact.tokens)} tokens" + _spent(found)
    for name, seconds in found.parts.items():
        meaning = f": {usage.MEANING[name]}" if name in usage.MEANING else ""
        share = f"{seconds / fact.total:.1%}".replace("%", " %")
        counted = {usage.SAVES: fact.saves, usage.EVALUATIONS: fact.evaluations}.get(name)
        times = f", {counted} of {seconds / counted:.3g} s" if counted else ""
        yield f"  {name:<14}{forecast_text.duration(seconds / 3600):>10} {share:>8}{times}{meaning}"
    if not fact.knows_data:
        yield "  waiting for data isn't known apart: the log doesn't say it"
    if step:
        yield f"  the forecast is by {step.source}"


def _row(name: str, taken: str, foreseen: str, ratio: float | None) -> str:
    off = f", {ratio:.2f} of the measured" if ratio else ""
    return f"  {name:<8}{taken}; forecast: {foreseen}{off}"


def _spent(found: Receipt) -> str:
    told, fact = "", found.fact
    if found.gpus:
        hours, each = fact.total / 3600 * found.gpus, price(fact.place)
        told += f", {hours:.3g} GPU-hours" + (f" for {hours * each:.4g}" if each else "")
    if fact.joules:
        told += f", {fact.joules / JOULES:.3g} kWh in the GPUs"
    return told


def as_json(found: Receipt) -> dict[str, Any]:
    """The receipt as JSON: ms, bytes, seconds, joules."""
    fact = found.fact
    hours = fact.total / 3600 * found.gpus
    each = price(fact.place) if found.gpus else None
    return {
        "run": fact.run,
        "place": fact.place or None,
        "outcome": fact.outcome or None,
        "attempts": fact.attempts,
        "step_ms": fact.ms,
        "step_ms_mean": round(fact.mean_ms, 3),
        "step_ms_spread": list(fact.spread),
        "memory_allocated": fact.allocated,
        "memory_reserved": fact.reserved,
        "seconds": round(fact.total, 3),
        "seconds_by_part": {name: round(value, 3) for name, value in fact.seconds.items()},
        "data_is_known": fact.knows_data,
        "iterations": fact.iterations,
        "tokens": fact.tokens,
        "saves": fact.saves,
        "evaluations": fact.evaluations,
        "gpu_hours": hours if found.gpus else None,
        "cost": hours * each if each else None,
        "joules": fact.joules,
        "forecast": forecast_text.as_json(found.forecast),
    }
