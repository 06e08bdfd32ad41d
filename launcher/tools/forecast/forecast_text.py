"""A forecast as lines of text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from launcher.runs.checks.machine import GB
from launcher.tools.forecast import timing
from launcher.tools.forecast.forecast import Forecast, OtherLayout
from launcher.tools.forecast.site import Range

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
WIDTH = 12


def lines(found: Forecast) -> Iterator[str]:
    """The forecast, a subject to a line."""
    where = found.work.where
    what = f"{where.world} × {found.machine.card or 'GPU'}"
    if found.work.on_cpu:
        what = found.machine.place or "the CPU"
    yield f"forecast for {what}:"
    for name, text in _subjects(found):
        yield f"  {name:<{WIDTH}}{text}"


def _subjects(found: Forecast) -> Iterator[tuple[str, str]]:
    if needed := found.memory:
        parts = asdict(needed)
        parts["CUDA, NCCL"] = parts.pop("overhead")
        told = ", ".join(f"{name} {size / GB:.1f}" for name, size in parts.items() if size)
        yield "memory", f"{_memory(found)}: {told}; by {found.sources['memory']}"
    if step := found.step:
        yield "step", f"{span(step.range, partial(ms, like=step.ms))}, by {step.source}"
    if links := found.sources.get("links"):
        yield "links", links
    if rate := found.tokens_per_s:
        yield "tokens/s", span(rate, count)
    if step and step.cost:
        total = sum(step.cost.parts.values())
        told = ", ".join(
            f"{name} {ms / total:.0%}" for name, ms in step.cost.parts.items() if ms > total / 200
        )
        yield "bound by", told.replace("%", " %")
    if hours := found.hours:
        told = span(hours, partial(duration, like=hours.value))
        yield "run", f"{told}: {found.work.steps} steps, {count(found.tokens)} tokens"
        if spent := found.gpu_hours:
            told = span(spent, lambda hours: f"{hours:.3g}" if hours < 1e3 else count(hours))
            told += " GPU-hours"
            if found.price is not None:
                cost = spent.times(found.price)
                told += f", {span(cost, lambda money: f'{money:.4g}')} at {found.price:g} an hour"
            yield "", told
    if found.checkpoint:
        told = f"{size(found.checkpoint)} each, {found.work.saves} in all"
        told += f", a save {span(found.saving, seconds)}" if found.saving else ""
        yield "checkpoints", told
    if found.disk:
        keeps = f"the newest {found.work.keep}" if found.work.keep else "all checkpoints"
        told = f"{size(found.disk)} for {keeps}"
        if found.free is not None:
            told += f", {size(found.free)} free" + ": too little" * (found.disk > found.free)
        yield "disk", told
    for other in found.others:
        yield "or", _other(other)
    if found.memory and 0 < found.machine.total < found.memory.total and not found.others:
        yield "or", "none of the layouts next to this one fits on so many of these GPUs"
    for text in found.unknown:
        yield "not known", text


def _memory(found: Forecast) -> str:
    """What a GPU needs of what it has."""
    assert found.memory_range
    total, needed = found.machine.total, found.memory_range
    told = f"{span(needed, lambda size: f'{size / GB:.1f}')} GB on a GPU"
    if not total:
        return told
    free = (total - needed.value) / GB
    return f"{told} of {total / GB:.1f}, {abs(free):.1f} {'free' if free >= 0 else 'too much'}"


def _other(other: OtherLayout) -> str:
    sets = ", ".join(
        f"{key.partition('.')[2]} {'none' if value is None else str(value).lower()}"
        for key, value in other.sets.items()
    )
    time = span(other.step.range, partial(ms, like=other.step.ms)) if other.step else ""
    return f"{sets}: {other.bytes / GB:.1f} GB" + (f", {time}" if time else "")


def span(value: Range, text: Any) -> str:
    """'16.3 ms (15.5 to 19.2)'; the number alone where it has no range."""
    if value.least == value.most:
        return str(text(value.value))
    return f"{text(value.value)} ({text(value.least)} to {text(value.most)})"


def ms(value: float, like: float = 0.0) -> str:
    """Milliseconds, or seconds where that is shorter: of this value, or of one `like` it."""
    return f"{value:.1f} ms" if (like or value) < 1000 else f"{value / 1000:.3g} s"


def seconds(value: float) -> str:
    """Seconds, in three digits."""
    return f"{value:.3g} s"


def duration(hours: float, like: float = 0.0) -> str:
    """Hours, days where there are many, minutes or seconds where there are few."""
    for unit, name in ((24 * 3, "days"), (1, "h"), (1 / 60, "min")):
        if (like or hours) >= unit:
            return f"{hours / (24 if name == 'days' else unit):.3g} {name}"
    return f"{hours * 3600:.3g} s"


def count(value: float) -> str:
    """124 M, in three digits."""
    for unit, letter in UNITS:
        if value >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.0f}"


def size(value: float) -> str:
    """Bytes in units of a thousand."""
    for unit, name in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e3:.3g} kB"


def as_json(found: Forecast) -> dict[str, Any]:
    """The forecast as JSON: bytes, ms, hours; each range as value, least and most."""

    def ranged(value: Range | None) -> dict[str, float] | None:
        return asdict(value) if value else None

    step, needed = found.step, found.memory
    return {
        "card": found.machine.card or None,
        "place": found.machine.place or None,
        "world": found.work.where.world,
        "nodes": found.work.nodes,
        "memory_range": ranged(found.memory_range),
        "memory": asdict(needed) | {"total": needed.total} if needed else None,
        "memory_of_card": found.machine.total or None,
        "step_ms": ranged(step.range if step else None),
        "step_parts_ms": timing.fields(step.cost) if step and step.cost else None,
        "bound": step.cost.bound if step and step.cost else None,
        "tokens_per_s": ranged(found.tokens_per_s),
        "steps": found.work.steps or None,
        "tokens": found.tokens or None,
        "hours": ranged(found.hours),
        "gpu_hours": ranged(found.gpu_hours),
        "price_of_gpu_hour": found.price,
        "checkpoint_bytes": found.checkpoint,
        "checkpoints": found.work.saves or None,
        "save_s": ranged(found.saving),
        "disk_bytes": found.disk,
        "disk_free_bytes": found.free,
        "others": [
            {
                "set": other.sets,
                "bytes": other.bytes,
                "step_ms": ranged(other.step.range if other.step else None),
            }
            for other in found.others
        ],
        "unknown": list(found.unknown),
        "sources": dict(found.sources),
    }
