"""Whether a model fits on its GPUs, and the smallest change with which it would."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.machine import memory
from launcher.machine.machine import GB, Finding, Gpu, Use
from launcher.plan import layout, model
from launcher.plan.config import RunConfig
from launcher.plan.render import values_of
from launcher.plan.source import Origin

MARGIN = 0.1
"""Up to this share above or below a GPU's memory an estimate warns and refuses nothing."""

MOST_TENSOR = 8
"""Processes that split a layer: no more than the GPUs of one machine, over their fast links."""


@dataclass(frozen=True)
class Change:
    """A change to a run file, as arguments that make it."""

    config: RunConfig
    argument: str


def check(
    config: RunConfig, origin: Origin, processes: int, visible: Sequence[Gpu], uses: Sequence[Use]
) -> Iterator[Finding]:
    """The estimate against the smallest GPU, and against the fullest one's free memory."""
    where = layout.layout(config, processes)
    visible = [gpu for gpu in visible if gpu.total]
    card = min(visible, key=lambda gpu: gpu.total, default=None)
    needed = memory.estimate(config, where, card.capability) if card else None
    if card is None or needed is None:
        return
    if needed.total > card.total * (1 - MARGIN):
        yield _too_large(config, origin, processes, card, needed)
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


def _too_large(
    config: RunConfig, origin: Origin, processes: int, card: Gpu, needed: memory.Memory
) -> Finding:
    over = needed.total > card.total * (1 + MARGIN)
    change = smallest(config, origin, processes, card)
    return Finding(
        f"{origin.of('model')}: about {_gb(needed.total)} GB on each GPU, and {card.name} has "
        f"{_gb(card.total)}",
        f"{told(needed)}.",
        _advice(change, processes, card) if change else _none(config, card),
        refuse=over,
    )


def told(needed: memory.Memory) -> str:
    """'weights 2.3 GB, gradients 4.6, …'."""
    parts = {
        "weights": needed.weights,
        "gradients": needed.gradients,
        "optimizer": needed.optimizer,
        "activations": needed.activations,
        "logits": needed.logits,
        "CUDA and NCCL": needed.overhead,
    }
    return ", ".join(f"{name} {_gb(size)}" for name, size in parts.items()) + " GB"


def _advice(change: Change, processes: int, card: Gpu) -> str:
    where = layout.layout(change.config, processes)
    needed = memory.estimate(change.config, where, card.capability)
    assert needed is not None
    return f"{change.argument}: then about {_gb(needed.total)} GB"


def smallest(config: RunConfig, origin: Origin, processes: int, card: Gpu) -> Change | None:
    """The first change, alone or on top of those before it, with which the model fits."""
    already = layout.faults(config, processes)  # which the image's Megatron allows
    for change in (*_single(config, processes), *_together(config, processes)):
        if _holds(change.config, processes, card, already):
            return change
    return None


def _holds(
    config: RunConfig, processes: int, card: Gpu, already: Sequence[layout.BrokenRule]
) -> bool:
    if any(fault not in already for fault in layout.faults(config, processes)):
        return False
    found = memory.estimate(config, layout.layout(config, processes), card.capability)
    return found is not None and found.total <= card.total * (1 - MARGIN)


Step = Callable[[RunConfig, int], Iterator[Change]]


def _micro_batches(config: RunConfig, processes: int) -> Iterator[Change]:
    micro = layout.micro_batch(config, layout.layout(config, processes)) or 1
    while micro > 1:
        micro //= 2
        yield _set(config, "training", "micro_batch_size", micro)


def _distributed_optimizer(config: RunConfig, processes: int) -> Iterator[Change]:
    if not config.parallel.use_distributed_optimizer:
        yield _set(config, "parallel", "use_distributed_optimizer", True)


def _sequence_parallel(config: RunConfig, processes: int) -> Iterator[Change]:
    tensor = config.parallel.tensor_model_parallel_size or 1
    if tensor > 1 and not config.parallel.sequence_parallel:
        yield _set(config, "parallel", "sequence_parallel", True)


def _recompute(config: RunConfig, processes: int) -> Iterator[Change]:
    options = values_of(config, layout.layout(config, processes))
    if config.program == model.GPT or options.get("recompute_granularity") == "full":
        return
    more = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    found = config.model_copy(update={"megatron_args": {**config.megatron_args, **more}})
    yield Change(found, " ".join(f"--set megatron_args.{k}={v}" for k, v in more.items()))


def _more_tensor(config: RunConfig, processes: int) -> Iterator[Change]:
    tensor = config.parallel.tensor_model_parallel_size or 1
    while (tensor := tensor * 2) <= min(MOST_TENSOR, processes):
        yield _set(config, "parallel", "tensor_model_parallel_size", tensor)


STEPS: tuple[Step, ...] = (
    _micro_batches,
    _distributed_optimizer,
    _sequence_parallel,
    _recompute,
    _more_tensor,
)
"""What may help, the least change to the run first."""


def _single(config: RunConfig, processes: int) -> Iterator[Change]:
    for step in STEPS:
        yield from step(config, processes)


def _together(config: RunConfig, processes: int) -> Iterator[Change]:
    """Each step's changes on top of the last ones of the steps before it."""
    base = Change(config, "")
    for step in (*STEPS, _sequence_parallel):  # once more, after tensor parallelism
        last = base
        for change in step(base.config, processes):
            last = replace(change, argument=f"{base.argument} {change.argument}".strip())
            yield last
        base = last


def _set(config: RunConfig, section: str, field: str, value: object) -> Change:
    changed = getattr(config, section).model_copy(update={field: value})
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Change(config.model_copy(update={section: changed}), f"--set {section}.{field}={text}")


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
        smaller = _set(config, "training", "micro_batch_size", 1).config
        if tensor > 1:
            smaller = _set(smaller, "parallel", "sequence_parallel", True).config
        found = memory.estimate(smaller, where, card.capability)
        if found and found.total <= card.total * (1 - MARGIN):
            return tensor, pipeline
    return None


def _gb(size: float) -> str:
    return f"{size / GB:.1f}"
