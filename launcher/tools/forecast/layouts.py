"""The layouts next to a run's own that fit on its GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, product
from math import inf, log2

from launcher.runs.checks.fit import MARGIN, MOST_TENSOR, smallest
from launcher.runs.checks.machine import Gpu
from launcher.runs.plan import layout
from launcher.runs.plan.model_size import PADDING
from launcher.runs.plan.render import values_of
from launcher.runs.plan.resolved import Resolved
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Override, overridden
from launcher.tools.forecast import site
from launcher.tools.forecast.forecast import Hardware, OtherLayout
from launcher.tools.forecast.usage import RunFact
from launcher.tools.forecast.work import Work, of_resolved

MOST_TRIED, SHOWN = 24, 2
"""Layouts that are looked at, the nearest first; and those that fit that are shown."""

LONG = 8192
"""Tokens of a sequence from which context parallelism is another way to divide a run."""

KEYS = ("tensor_model", "pipeline_model", "context", "expert_model")
Split = tuple[int, int, int, int]
"""TP, PP, CP and EP, in the order of KEYS."""


def nearest(resolved: Resolved, machine: Hardware, known: Sequence[RunFact]) -> list[OtherLayout]:
    """The two nearest layouts that fit, of those as near the fastest; none where the GPU's memory,
    or the model, isn't known.

    Where the run itself doesn't fit, the least change with which it would comes first.
    """
    base, needed = of_resolved(resolved), None
    if not base.on_cpu and machine.total:
        needed = base.memory(machine.capability)
    if needed is None:
        return []
    found, faulty = list[OtherLayout](), {fault.key for fault in resolved.faults}
    rings = groupby(_splits(base), key=lambda split: _apart(split, _own(base)))
    several = [[_sets(resolved.config, base, split) for split in ring] for _, ring in rings]
    if needed.total > machine.total * (1 - MARGIN):
        card = Gpu(0, "", machine.card, machine.total, 0, machine.capability, "")
        least = smallest(resolved.config, resolved.processes, card)
        several = [[least] if least else [], *several]
    for ring in several:
        fits = list[OtherLayout]()
        for sets in ring:
            config = layout.with_precision(
                overridden(resolved.config, [Override("forecast", sets)])
            )
            where = layout.layout(config, resolved.processes)
            broken = layout.faults(config, where, resolved.facts.release)
            other = any(fault.key not in faulty for fault in broken)
            if other or not layout.places_experts(config, where):
                continue
            work = replace(base, options=values_of(config, where), where=where)
            needed = work.memory(machine.capability)
            if needed and needed.total <= machine.total * (1 - MARGIN):
                step = site.step(work, machine.rates(work, known), known)
                fits.append(OtherLayout(sets, needed.total, step))
        found += sorted(fits, key=lambda each: (each.step.ms if each.step else inf, each.bytes))
        if len(found) >= SHOWN:
            break
    return found[:SHOWN]


def _own(base: Work) -> Split:
    """The run's own."""
    where = base.where
    return where.tensor, where.pipeline, where.context, base.number(f"{KEYS[3]}_parallel_size", 1)


def _apart(one: Split, other: Split) -> float:
    """How often sizes are doubled or halved from one to the other."""
    return sum(abs(log2(a / b)) for a, b in zip(one, other, strict=True))


def _splits(base: Work) -> list[Split]:
    """Those that the model and the processes allow, the nearest first, without the run's own."""
    where, shape, own = base.where, base.shape, _own(base)
    assert shape
    machine = where.world // base.nodes
    contexts = layout.divisors(machine) if shape.sequence >= LONG else [where.context]
    experts = layout.divisors(shape.experts) if shape.experts else [1]
    rows = list[Split]()
    for tensor, pipeline, context, over in product(
        layout.divisors(min(machine, MOST_TENSOR)), layout.divisors(where.world), contexts, experts
    ):
        replicas, rest = divmod(where.world, tensor * pipeline * context)
        widths = (shape.heads, shape.groups, shape.expert_ffn, shape.shared_ffn)
        divides = shape.layers % pipeline == 0 and not any(width % tensor for width in widths)
        spread = replicas * context if where.data % own[3] else replicas  # experts, over CP too
        if not rest and divides and spread % over == 0 and own != (tensor, pipeline, context, over):
            rows.append((tensor, pipeline, context, over))
    return sorted(rows, key=lambda split: (_apart(split, own), split))[:MOST_TRIED]


def _sets(config: RunConfig, base: Work, split: Split) -> dict[str, object]:
    """The keys of a layout that another one than the run's own has.

    The micro-batch is the largest up to the run's own that the global batch allows. TP that is
    split takes sequence parallelism, as it needs less and loses nothing.
    """
    tensor, pipeline, context, _ = split
    share = base.batch // (base.where.world // (tensor * pipeline * context))
    sizes = [size for size in layout.divisors(max(1, share)) if size <= base.micro]
    sets: dict[str, object] = {
        f"parallel.{key}_parallel_size": size
        for key, size, own in zip(KEYS, split, _own(base), strict=True)
        if size != own
    }
    sets["training.micro_batch_size"] = max(sizes, default=1)
    if (config.parallel.sequence_parallel or False) != (tensor > 1):
        sets["parallel.sequence_parallel"] = True if tensor > 1 else None
    multiple = config.model.make_vocab_size_divisible_by or PADDING
    padding = multiple * base.where.tensor
    if padding % tensor == 0 and padding // tensor != multiple:
        sets["model.make_vocab_size_divisible_by"] = padding // tensor
    return sets
