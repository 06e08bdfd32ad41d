"""Prepares a run to continue from its newest checkpoint, also on another number of GPUs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import Any

from launcher.base.errors import UsageError
from launcher.runs.plan import layout
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.model_size import PADDING
from launcher.runs.plan.program import SKIP, ProgramKind, program
from launcher.runs.plan.program_options import plain
from launcher.runs.runfile.config import RunConfig, Training
from launcher.trainer.gpt.arguments import padded_vocabulary

ONE_STEP = "ckpt_step"
"""Megatron's option to load the checkpoint of one iteration, where it isn't the newest."""

SKIPPED = plain(SKIP)

SCHEDULE = (
    *("train_iters", "train_samples", "lr", "min_lr", "lr_decay_style", "lr_decay_iters"),
    *("lr_decay_samples", "lr_warmup_fraction", "lr_warmup_iters", "lr_warmup_samples"),
)
"""Settings of the training section that a schedule of the learning rate is made of."""

OVERRIDE = "override_opt_param_scheduler"
"""Megatron's option to take those of the command line, where a checkpoint has others."""


@dataclass(frozen=True)
class Resumption:
    """The configuration to go on with, and lines to print on how it differs."""

    config: RunConfig
    notes: tuple[str, ...]


def from_newest(config: RunConfig) -> RunConfig:
    """`config` so that it loads what it saved, all of it. UsageError: it saved nothing."""
    checkpoint = config.checkpoint
    if not checkpoint.save:
        raise UsageError(
            "the run saved no checkpoints, so there is none to continue from",
            "Set checkpoint.save and checkpoint.save_interval in the run file.",
        )
    whole = {"no_load_optim": None, "no_load_rng": None, "finetune": None}
    one_step = {name: None for name in config.megatron_args if plain(name) == ONE_STEP}
    return _with(config, checkpoint={"load": checkpoint.save, **whole}, megatron_args={**one_step})


def last_iteration(training: Training) -> int | None:
    """The iteration that training ends with; None where the run file doesn't say it."""
    samples, batch = training.train_samples, training.global_batch_size
    if training.train_iters or not (samples and batch) or training.rampup_batch_size:
        return training.train_iters
    return -(-samples // batch)


def skipping(config: RunConfig, passed: Collection[int]) -> RunConfig:
    """`config` so that the batches of these iterations, 1 the first, are passed over as well.

    Of Megatron's programs one more before each: its releases count from 0, or from 1.
    """
    if not passed:
        return config
    upstream = program(config.program).kind is ProgramKind.UPSTREAM
    wanted = {*passed, *(number - 1 for number in passed if upstream)}
    known = {name: value for name, value in config.megatron_args.items() if plain(name) == SKIPPED}
    for value in known.values():
        wanted |= {int(str(one)) for one in (value if isinstance(value, list) else [value])}
    return _with(config, megatron_args={**dict.fromkeys(known), SKIPPED: sorted(wanted)})


def upstreams(config: RunConfig, was: RunConfig) -> Resumption:
    """`config` so that upstream's programs load what they saved with `was`, in what has changed.

    They refuse another schedule, and end with 0 where random states are another layout's. Our own
    program takes the run file's schedule, and leaves those states out.
    """
    if program(config.program).kind is not ProgramKind.UPSTREAM:
        return Resumption(config, ())
    notes, sections = list[str](), dict[str, dict[str, Any]]()
    if _model_parallel(config) != _model_parallel(was):
        sections["checkpoint"] = {"no_load_rng": True}
    now, then = config.training, was.training
    named = {plain(name) for name in config.megatron_args}
    if any(getattr(now, key) != getattr(then, key) for key in SCHEDULE) and not named & {
        OVERRIDE,
        "use_checkpoint_opt_param_scheduler",
    }:
        sections["megatron_args"] = {OVERRIDE: True}
        notes.append("the learning rate's schedule is the new one, not the checkpoint's")
    return Resumption(_with(config, **sections), tuple(notes))


def _model_parallel(config: RunConfig) -> tuple[int, int]:
    where = layout.layout(config, 1)
    return where.tensor, where.pipeline


def on_processes(
    config: RunConfig, before: int, after: int, was: RunConfig | None = None
) -> Resumption:
    """`config`, whose run had `before` processes on each node, for `after` of them.

    `was` is the configuration it ran with, where keys were set since; sizes set so are kept. The
    number of replicas changes first, then the pipeline, then tensor and last context parallelism.
    The global batch and the padded vocabulary stay. Raises UsageError where nothing fits.
    """
    was = was or config
    old, asked = layout.layout(was, before), layout.layout(config, after)
    if old == asked:
        return Resumption(config, ())
    whole = config.training.global_batch_size or _global_batch(was, old)
    if replace(asked, world=old.world) == old:
        candidates = _layouts(old, config, asked.world)
    else:
        candidates = iter([asked])
    for where in candidates:
        found = _fitting(config, where, whole, after)
        found = found and _same_vocabulary(found, was, old.tensor, where.tensor)
        if found:
            return Resumption(found, tuple(_notes(was, found, old, where)))
    raise UsageError(
        f"no layout fits {asked.world} processes: the global batch ({whole or 'not given'}), "
        f"{config.model.num_attention_heads} heads and {config.model.num_layers} layers stay",
        f"Nearest that keep {_told(asked, data=False)}: {_nearest(asked, whole)} processes in all.",
    )


def _global_batch(config: RunConfig, where: Layout) -> int | None:
    """The samples of a step: what is set, or Megatron's default; None where neither is known."""
    if config.training.global_batch_size:
        return config.training.global_batch_size
    micro = layout.micro_batch(config, where)
    return micro and micro * where.data


def _layouts(old: Layout, config: RunConfig, world: int) -> Iterator[Layout]:
    """The layouts of `world` processes to try: as it was, then the nearest, smaller ones first.

    What the run file says of its stages holds for their number alone, and a checkpoint of the old
    format can't be divided anew.
    """
    named = {plain(name): value for name, value in config.megatron_args.items()}
    whole_only = named.get("ckpt_format") == "torch"
    stages_stay = whole_only or any("pipeline" in name for name in named)
    heads, layers = config.model.num_attention_heads, config.model.num_layers
    tensors = [old.tensor] if whole_only else _from(old.tensor, heads)
    pipelines = [old.pipeline] if stages_stay else _from(old.pipeline, layers)
    contexts = reversed(layout.divisors(old.context))
    for context, tensor, pipeline in product(contexts, tensors, pipelines):
        yield Layout(world, tensor, pipeline, context)


def _from(size: int, whole: int | None) -> list[int]:
    """`size`, then the smaller divisors of `whole` from the largest down, then the larger ones."""
    return sorted({size, *layout.divisors(whole or size)}, key=lambda n: (n > size, abs(n - size)))


def _fitting(config: RunConfig, where: Layout, whole: int | None, after: int) -> RunConfig | None:
    """`config` in that layout with the same global batch; None where it doesn't divide."""
    if where.world % where.model or where.data % (config.parallel.expert_model_parallel_size or 1):
        return None
    training = _batches(config, where, whole)
    if training is None:
        return None
    changed = _with(config, parallel=_parallel(config, where), training=training)
    return None if layout.faults(changed, layout.layout(changed, after)) else changed


def _parallel(config: RunConfig, where: Layout) -> dict[str, Any]:
    """What changes in the section parallel; a part that others divide is left out with them."""
    sizes = {
        "tensor_model_parallel_size": where.tensor,
        "pipeline_model_parallel_size": where.pipeline,
        "context_parallel_size": where.context,
    }
    now = config.parallel
    changed: dict[str, Any] = {k: n for k, n in sizes.items() if n != (getattr(now, k) or 1)}
    if "pipeline_model_parallel_size" in changed:
        changed["num_layers_per_virtual_pipeline_stage"] = None
    if where.tensor == 1:
        changed["sequence_parallel"] = None
    return changed


def _batches(config: RunConfig, where: Layout, whole: int | None) -> dict[str, Any] | None:
    """The batch sizes that give the same global batch; None where it can't be divided evenly."""
    if whole is None:
        return {}
    start, increment, _ = config.training.rampup_batch_size or (whole, whole, 0)
    common = gcd(whole, start, increment)
    if common % where.data:
        return None
    micro = config.training.micro_batch_size
    if isinstance(micro, int):
        micro = max(n for n in layout.divisors(common // where.data) if n <= micro)
    return {"global_batch_size": whole, "micro_batch_size": micro}


def _same_vocabulary(
    config: RunConfig, was: RunConfig, before: int, after: int
) -> RunConfig | None:
    """`config` with the padding that gives TP=`after` the vocabulary that TP=`before` had.

    Megatron pads to a multiple of make_vocab_size_divisible_by × TP. None where the vocabulary
    can't be divided among `after`.
    """
    if before == after:
        return config
    multiple = (was.model.make_vocab_size_divisible_by or PADDING) * before
    if multiple % after and was.data.vocab_size:
        multiple = padded_vocabulary(was.data.vocab_size, multiple, 1)
    if multiple % after:
        return None
    return _with(config, model={"make_vocab_size_divisible_by": multiple // after})


def _notes(was: RunConfig, config: RunConfig, old: Layout, new: Layout) -> Iterator[str]:
    told = f"layout: {_told(old)} -> {_told(new)}"
    batch = config.training.global_batch_size
    same = batch is not None and batch == _global_batch(was, old)
    yield f"{told}; the global batch stays {batch}" if same else told
    drops = config.model.hidden_dropout != 0 or config.model.attention_dropout != 0
    if (old.tensor, old.pipeline) != (new.tensor, new.pipeline):
        also = ", so dropout draws other numbers" if drops else ""
        yield f"weights and optimizer are divided again; random states aren't carried over{also}"
    elif drops:
        yield "dropout draws other numbers, as the number of replicas is another"
    if was.parallel.sequence_parallel and not config.parallel.sequence_parallel:
        yield "sequence parallelism is off, as there is no tensor parallelism"


def _told(where: Layout, *, data: bool = True) -> str:
    sizes = [("TP", where.tensor), ("PP", where.pipeline)]
    sizes += [("CP", where.context)] if where.context > 1 else []
    sizes += [("DP", where.data)] if data else []
    return " ".join(f"{name}={size}" for name, size in sizes)


def _nearest(where: Layout, whole: int | None) -> str:
    """The nearest numbers of processes for which this layout's replicas divide the batch."""
    replicas = layout.divisors(whole) if whole else [max(1, where.data), where.data + 1]
    near = sorted(replicas, key=lambda n: abs(n * where.model - where.world))[:2]
    return layout.listed(sorted(n * where.model for n in near))


def _with(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    """`config` with keys of sections set; None takes a key out."""
    data = config.model_dump(exclude_unset=True)
    for section, values in sections.items():
        kept = data.get(section, {}) | values
        data[section] = {key: value for key, value in kept.items() if value is not None}
        if not data[section]:
            del data[section]
    return RunConfig.model_validate(data)
