"""Whether a model fits on its GPUs, and the smallest change with which it would."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from launcher.runs.checks import memory
from launcher.runs.checks.machine import GB, Finding, Gpu, Use
from launcher.runs.plan import layout
from launcher.runs.plan.render import values_of
from launcher.runs.plan.resolved import Resolved
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Override, overridden

MARGIN = 0.1
"""Up to this share above or below a GPU's memory an estimate warns and refuses nothing."""

MOST_TENSOR = 8
"""Processes that split a layer: no more than the GPUs of one machine, over their fast links."""

Changes = dict[str, object]
"""What to change in a run file: values by dotted keys."""


def check_fit(resolved: Resolved, visible: Sequence[Gpu], uses: Sequence[Use]) -> Iterator[Finding]:
    """The estimate against the smallest GPU, and against the fullest one's free memory."""
    config, origin, processes = resolved.config, resolved.origin, resolved.processes
    visible = [gpu for gpu in visible if gpu.total]
    card = min(visible, key=lambda gpu: gpu.total, default=None)
    capability = card.capability if card else None
    needed = (
        memory.needed(config.program, resolved.values, resolved.layout, capability)
        if card
        else None
    )
    if card is None or needed is None:
        return
    if needed.total > card.total * (1 - MARGIN):
        yield Finding(
            f"{origin.place('model')}: about {_gb(needed.total)} GB on each GPU, and {card.name} "
            f"has {_gb(card.total)}",
            f"{told(needed)}.",
            _smallest(config, processes, card) or _none(config, card),
            refuse=needed.total > card.total * (1 + MARGIN),
        )
        return
    for gpu in visible:
        free = gpu.total - gpu.used
        if needed.total > free * (1 - MARGIN):
            users = ", ".join(str(use) for use in uses if use.gpu == gpu.uuid)
            yield Finding(
                f"GPU {gpu.index} has {_gb(free)} GB of {_gb(gpu.total)} free"
                + (f": {users}" if users else ""),
                f"This run needs about {_gb(needed.total)} GB on it.",
                "Choose a free one with --gpus device=…, or end what uses it.",
                refuse=needed.total > free * (1 + MARGIN),
            )


def told(needed: memory.MemoryEstimate) -> str:
    """'weights 2.3 GB, gradients 4.6, …'."""
    sizes = asdict(needed) | {"CUDA and NCCL": needed.overhead}
    for name in ("overhead", *([] if needed.workspace else ["workspace"])):
        del sizes[name]
    return ", ".join(f"{name} {_gb(size)}" for name, size in sizes.items()) + " GB"


def smallest(config: RunConfig, processes: int, card: Gpu) -> Changes | None:
    """The least change with which the model fits, {} where it does; None where none helps."""
    needed = memory.estimate(config, layout.layout(config, processes), card.capability)
    if needed is None or needed.total <= card.total * (1 - MARGIN):
        return {}
    found = next(_fitting(config, processes, card), None)
    return found and found[0]


def _smallest(config: RunConfig, processes: int, card: Gpu) -> str:
    """The least change with which the model fits, as options."""
    for changes, total in _fitting(config, processes, card):
        words = " ".join(f"--set {key}={str(value).lower()}" for key, value in changes.items())
        return f"{words}: then about {_gb(total)} GB"
    return ""


def _fitting(config: RunConfig, processes: int, card: Gpu) -> Iterator[tuple[Changes, float]]:
    """The changes, alone or on top of those before, with which the model fits, and its bytes."""
    # What is wrong already, the image's Megatron allows.
    already = layout.faults(config, layout.layout(config, processes))
    for changes in _tried(config, processes):
        changed = _with(config, changes)
        where = layout.layout(changed, processes)
        broken = any(fault not in already for fault in layout.faults(changed, where))
        if broken or not layout.places_experts(changed, where):
            continue
        needed = memory.estimate(changed, where, card.capability)
        if needed and needed.total <= card.total * (1 - MARGIN):
            yield changes, needed.total


def _with(config: RunConfig, changes: Changes) -> RunConfig:
    return overridden(config, [Override("", changes)])


def _tried(config: RunConfig, processes: int) -> Iterator[Changes]:
    """Each step's changes alone, then on top of the last ones of the steps before it."""
    for changes in (steps := _steps(config, processes)):
        yield from changes
    base: Changes = {}
    for step in (*range(len(steps)), SEQUENCE_PARALLEL):  # once more, after tensor parallelism
        last = base
        for change in _steps(_with(config, base), processes)[step]:
            last = base | change
            yield last
        base = last


def _steps(config: RunConfig, processes: int) -> list[list[Changes]]:
    """What may help, the least change to the run first: of each step its changes."""
    parallel, where = config.parallel, layout.layout(config, processes)
    micro, tensor = layout.micro_batch(config, where) or 1, where.tensor
    again = values_of(config, where).get("recompute_granularity") == "full"
    full = {"granularity": "full", "method": "uniform", "num_layers": 1}
    recompute: Changes = {f"megatron_args.recompute_{key}": value for key, value in full.items()}
    sizes = [tensor << n for n in range(1, MOST_TENSOR)]
    alone = parallel.sequence_parallel or tensor == 1
    distributed = parallel.use_distributed_optimizer
    return [
        [{"training.micro_batch_size": micro >> n} for n in range(1, micro.bit_length())],
        [] if distributed else [{"parallel.use_distributed_optimizer": True}],
        [] if alone else [{"parallel.sequence_parallel": True}],
        [] if again else [recompute],
        [
            {"parallel.tensor_model_parallel_size": size}
            for size in sizes
            if size <= min(MOST_TENSOR, processes)
        ],
    ]


SEQUENCE_PARALLEL = 2
"""Which of the steps it is."""


def _none(config: RunConfig, card: Gpu) -> str:
    count = replicas_of_one(config, card)
    if count is None:
        return f"No layout of this model fits on GPUs of {_gb(card.total)} GB: take a smaller one."
    tensor, pipeline = count
    return (
        f"No setting makes it fit on these GPUs. {tensor * pipeline} of this size would hold it: "
        f"tensor {tensor} × pipeline {pipeline}."
    )


def replicas_of_one(config: RunConfig, card: Gpu) -> tuple[int, int] | None:
    """The smallest tensor × pipeline that holds one replica with micro-batch 1; None: none does."""
    heads, layers = config.model.num_attention_heads or 1, config.model.num_layers or 1
    groups = config.model.num_query_groups or heads
    splits = [
        (tensor, pipeline)
        for tensor in (1, 2, 4, 8)
        for pipeline in range(1, layers + 1)
        if heads % tensor == groups % tensor == layers % pipeline == 0
    ]
    for tensor, pipeline in sorted(splits, key=lambda split: (split[0] * split[1], split[1])):
        where = layout.Layout(tensor * pipeline, tensor, pipeline, 1)
        split = {"parallel.sequence_parallel": True} if tensor > 1 else {}
        smaller = _with(config, {"training.micro_batch_size": 1, **split})
        found = memory.estimate(smaller, where, card.capability)
        if found and found.total <= card.total * (1 - MARGIN):
            return tensor, pipeline
    return None


def _gb(size: float) -> str:
    return f"{size / GB:.1f}"
