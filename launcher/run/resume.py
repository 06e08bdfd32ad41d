"""What goes on with a run: the same, from its newest checkpoint, on another number of GPUs too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.errors import UsageError
from launcher.run import layout
from launcher.run.config import RunConfig

DIVISIBLE_BY = 128
"""Megatron's default for make_vocab_size_divisible_by."""


@dataclass(frozen=True)
class Resumed:
    """The configuration to go on with, and what is worth telling of how it differs."""

    config: RunConfig
    notes: tuple[str, ...]


def from_newest(config: RunConfig) -> RunConfig:
    """`config` so that it goes on where it ended: it loads what it saved, all of it.

    Raises UsageError where it saved nothing.
    """
    checkpoint = config.checkpoint
    if not checkpoint.save:
        raise UsageError(
            "the run saved no checkpoints, so there is nothing to go on from",
            "Set checkpoint.save and checkpoint.save_interval in the run file.",
        )
    whole = {"no_load_optim": None, "no_load_rng": None, "finetune": None}
    return _with(config, checkpoint={"load": checkpoint.save, **whole})


def on(config: RunConfig, before: int, after: int) -> Resumed:
    """`config`, which ran on `before` processes on each node, for `after` of them.

    The number of replicas changes first, then the pipeline, then tensor parallelism; the global
    batch and the padded vocabulary stay. Raises UsageError where nothing fits.
    """
    old = layout.layout(config, before)
    if before == after:
        return Resumed(config, ())
    whole = config.training.global_batch_size
    if whole is None:
        whole = (layout.micro_batch(config, old) or 1) * old.data
    for tensor, pipeline in _layouts(old, config):
        found = _fitting(config, whole, tensor, pipeline, after)
        found = found and _same_vocabulary(found, old.tensor, tensor)
        if found:
            return Resumed(found, tuple(_notes(found, old, layout.layout(found, after))))
    raise UsageError(
        f"no layout fits {after} processes: the global batch of {whole}, "
        f"{config.model.num_attention_heads} heads and {config.model.num_layers} layers stay",
        f"Choose a number that TP={old.tensor} × PP={old.pipeline} divides, or that divides it.",
    )


def _layouts(old: layout.Layout, config: RunConfig) -> Iterator[tuple[int, int]]:
    """Tensor and pipeline sizes to try: as it was, then other pipelines, then other splits."""
    heads, layers = config.model.num_attention_heads or 1, config.model.num_layers or 1
    pipelines = sorted(_divisors(layers), key=lambda n: (n > old.pipeline, abs(n - old.pipeline)))
    tensors = sorted(_divisors(heads), key=lambda n: (n > old.tensor, abs(n - old.tensor)))
    for tensor in dict.fromkeys([old.tensor, *tensors]):
        for pipeline in dict.fromkeys([old.pipeline, *pipelines]):
            yield tensor, pipeline


def _divisors(whole: int) -> list[int]:
    return [n for n in range(1, whole + 1) if whole % n == 0]


def _fitting(
    config: RunConfig, whole: int, tensor: int, pipeline: int, processes: int
) -> RunConfig | None:
    """`config` in that layout with the same global batch; None where it doesn't divide."""
    world = processes * config.nodes.count
    model = tensor * pipeline * (config.parallel.context_parallel_size or 1)
    if world % model or whole % (world // model):
        return None
    share = whole // (world // model)
    micro = config.training.micro_batch_size
    if isinstance(micro, int):
        micro = max(n for n in range(1, micro + 1) if share % n == 0)
    changed = _with(
        config,
        parallel={
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "sequence_parallel": config.parallel.sequence_parallel if tensor > 1 else None,
        },
        training={"global_batch_size": whole, "micro_batch_size": micro},
    )
    return None if any(layout.faults(changed, processes)) else changed


def _same_vocabulary(config: RunConfig, before: int, after: int) -> RunConfig | None:
    """`config` with the padding that gives TP=`after` the vocabulary that TP=`before` had.

    None where that vocabulary can't be divided among `after`.
    """
    size = config.data.vocab_size
    if before == after or size is None:
        return config
    multiple = (config.model.make_vocab_size_divisible_by or DIVISIBLE_BY) * before
    padded = -(-size // multiple) * multiple
    if padded % after:
        return None
    return _with(config, model={"make_vocab_size_divisible_by": padded // after})


def _notes(config: RunConfig, old: layout.Layout, new: layout.Layout) -> Iterator[str]:
    yield f"layout: {_told(old)} -> {_told(new)}; the global batch stays"
    if (old.tensor, old.pipeline) != (new.tensor, new.pipeline):
        yield (
            "weights and optimizer are divided anew; random states are not carried over, so "
            "dropout draws other numbers"
        )
    elif config.model.hidden_dropout != 0 or config.model.attention_dropout != 0:
        yield "dropout draws other numbers, as the replicas are others"


def _told(where: layout.Layout) -> str:
    return f"TP={where.tensor} PP={where.pipeline} DP={where.data}"


def _with(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """`config` with keys of sections set; None takes a key out."""
    data = config.model_dump(exclude_unset=True)
    for section, values in sections.items():
        data[section] = data.get(section, {}) | values
    return RunConfig.model_validate(data)
