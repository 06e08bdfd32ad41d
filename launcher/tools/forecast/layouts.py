"""The layouts next to a run's own that fit on its GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import log2

from launcher.runs.checks.fit import MARGIN, MOST_TENSOR, smallest
from launcher.runs.checks.machine import Gpu
from launcher.runs.plan import layout
from launcher.runs.plan.model import PADDING
from launcher.runs.plan.render import values_of
from launcher.runs.plan.resolved import Resolved
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.source import Override, overridden
from launcher.tools.forecast import site
from launcher.tools.forecast.facts import RunFact
from launcher.tools.forecast.forecast import Hardware, OtherLayout
from launcher.tools.forecast.work import Work, of_resolved

MOST_TRIED, SHOWN = 12, 2
"""Layouts that are looked at, the nearest first; and those that fit that are shown."""


def nearest(run: Resolved, machine: Hardware, known: Sequence[RunFact]) -> list[OtherLayout]:
    """The two nearest layouts that fit; none where the GPU's memory, or the model, isn't known.

    Where the run itself doesn't fit, the least change with which it would comes first.
    """
    base, needed = of_resolved(run), None
    if not base.on_cpu and machine.total:
        needed = base.memory(machine.capability)
    if needed is None:
        return []
    found, faulty = list[OtherLayout](), {fault.key for fault in run.faults}
    candidates = [*_candidates(run.config, base)]
    if needed.total > machine.total * (1 - MARGIN):
        card = Gpu(0, "", machine.card, machine.total, 0, machine.capability, "")
        candidates = [*filter(None, [smallest(run.config, run.processes, card)]), *candidates]
    for sets in candidates:
        config = layout.with_precision(overridden(run.config, [Override("forecast", sets)]))
        where = layout.layout(config, run.processes)
        broken = layout.faults(config, where, run.facts.release)
        if any(fault.key not in faulty for fault in broken):
            continue
        work = replace(base, options=values_of(config, where), where=where)
        needed = work.memory(machine.capability)
        if needed and needed.total <= machine.total * (1 - MARGIN):
            step = site.step(work, machine.rates(work, known), known)
            found.append(OtherLayout(sets, needed.total, step))
        if len(found) == SHOWN:
            break
    return found


def _candidates(config: RunConfig, base: Work) -> Iterator[dict[str, object]]:
    """The keys of other layouts, the nearest first: by how often TP and PP are doubled or halved.

    The micro-batch is the largest up to the run's own that the global batch allows. TP that is
    split takes sequence parallelism, as it needs less and loses nothing.
    """
    where, shape = base.where, base.shape
    assert shape
    own = config.parallel
    rows = list[tuple[float, int, int]]()
    for tensor in layout.divisors(min(where.world // base.nodes, MOST_TENSOR)):
        for pipeline in layout.divisors(where.world):
            split = tensor * pipeline * where.context
            fits = shape.heads % tensor == shape.groups % tensor == shape.layers % pipeline == 0
            same = (tensor, pipeline) == (where.tensor, where.pipeline)
            if where.world % split == 0 and fits and not same:
                apart = abs(log2(tensor / where.tensor)) + abs(log2(pipeline / where.pipeline))
                rows.append((apart, tensor, pipeline))
    padding = (config.model.make_vocab_size_divisible_by or PADDING) * where.tensor
    for _, tensor, pipeline in sorted(rows)[:MOST_TRIED]:
        share = base.batch // (where.world // (tensor * pipeline * where.context))
        sizes = [size for size in layout.divisors(max(1, share)) if size <= base.micro]
        sets: dict[str, object] = {
            "parallel.tensor_model_parallel_size": tensor,
            "parallel.pipeline_model_parallel_size": pipeline,
            "training.micro_batch_size": max(sizes, default=1),
        }
        if (own.sequence_parallel or False) != (tensor > 1):
            sets["parallel.sequence_parallel"] = True if tensor > 1 else None
        if padding % tensor == 0 and padding // tensor != config.model.make_vocab_size_divisible_by:
            sets["model.make_vocab_size_divisible_by"] = padding // tensor
        yield sets
