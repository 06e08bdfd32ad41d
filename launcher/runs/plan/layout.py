"""How a run is divided over its processes: the rules, and the nearest values that work.

Each rule's docstring names the file of Megatron that it was read in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import gcd, isqrt, lcm

from launcher.agent import series
from launcher.base.errors import UsageError
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin

LARGEST_AUTO = 16
"""The largest micro-batch that `auto` chooses; larger ones gain little and need much memory."""

EXCLUSIVE = (
    ("fp16", "bf16"),
    ("train_iters", "train_samples"),
    ("lr_warmup_fraction", "lr_warmup_iters"),
    ("lr_warmup_fraction", "lr_warmup_samples"),
    ("train_iters", "lr_decay_samples"),
    ("train_iters", "lr_warmup_samples"),
    ("train_samples", "lr_decay_iters"),
    ("train_samples", "lr_warmup_iters"),
)
"""Settings of the training section of which Megatron takes one: training/arguments.py."""


@dataclass(frozen=True)
class Layout:
    """Process counts: tensor, pipeline, context and data parallel; world is all processes."""

    world: int
    tensor: int
    pipeline: int
    context: int

    @property
    def model(self) -> int:
        """The processes that hold one replica of the model."""
        return self.tensor * self.pipeline * self.context

    @property
    def data(self) -> int:
        """The replicas of the model."""
        return self.world // self.model


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a configuration breaks: the key, what is wrong, and what would work."""

    key: str
    problem: str
    remedy: str


def layout(config: RunConfig, processes: int) -> Layout:
    """The layout of `config` with `processes` on each node."""
    parallel = config.parallel
    return Layout(
        world=processes * config.nodes.count,
        tensor=parallel.tensor_model_parallel_size or 1,
        pipeline=parallel.pipeline_model_parallel_size or 1,
        context=parallel.context_parallel_size or 1,
    )


def places_experts(config: RunConfig, where: Layout) -> bool:
    """Whether expert parallelism divides the processes that it is over: core/parallel_state.py."""
    tensor = config.megatron_args.get("expert_tensor_parallel_size") or where.tensor
    over = config.parallel.expert_model_parallel_size or 1
    return not isinstance(tensor, int) or where.world % (tensor * where.pipeline * over) == 0


def micro_batch(config: RunConfig, where: Layout) -> int | None:
    """The micro-batch size, `auto` resolved: the largest up to 16 that fits the global batch."""
    size, whole = config.training.micro_batch_size, config.training.global_batch_size
    if size != "auto":
        return int(size) if size is not None else None
    batches = [whole or LARGEST_AUTO, *(config.training.rampup_batch_size or [])[:2]]
    share = gcd(*batches) // max(1, where.data)
    return max((n for n in range(1, LARGEST_AUTO + 1) if share % n == 0), default=1)


def with_precision(config: RunConfig, bf16: bool = False) -> RunConfig:
    """`config` with its `precision` as fp16, bf16 or neither; fp8 is bf16 with `fp8_format`.

    `auto` is neither on the CPU; on GPUs bf16 where all are known to have it, and else fp16.
    """
    training = config.training
    if training.precision is None:
        return config
    chosen = training.precision
    if chosen == "auto":
        chosen = "fp32" if config.gpus == "0" else "bf16" if bf16 else "fp16"
    update: dict[str, object] = {"precision": None}
    if chosen == "fp8":
        chosen, others = "bf16", {"fp8_format": "hybrid", **config.megatron_args}
        config = config.model_copy(update={"megatron_args": others})
    if not (training.fp16 or training.bf16) and chosen != "fp32":
        update[chosen] = True
    return config.model_copy(update={"training": training.model_copy(update=update)})


def refuse(found: Iterable[BrokenRule], origin: Origin) -> None:
    """Raise UsageError with every broken rule, if there is one."""
    told = [f"{origin.place(f.key)}: {f.problem}\n  {f.remedy}" for f in found]
    if told:
        raise UsageError("\n".join(told))


def faults(config: RunConfig, where: Layout, release: str | None = None) -> list[BrokenRule]:
    """Every rule that `config` breaks, laid out as `where` says, with Megatron `release`."""
    found = [*_world(config, where), *_model(config, where, release), *_training(config)]
    if not found:  # the replicas' number means nothing before the world size fits
        found = list(_batches(config, where))
    return found


def fewer(
    config: RunConfig, origin: Origin, processes: int, release: str | None = None
) -> tuple[int, ...]:
    """The numbers of nodes below all with which `config` works as it is, from `nodes.min` on.

    The batches stay: so a global batch has to be given, as Megatron's own grows with the world.
    Raises UsageError.
    """
    nodes, training = config.nodes, config.training
    if not nodes.min or nodes.min == nodes.count:
        return ()
    place = origin.place("nodes.min")
    if training.model_fields_set and not training.global_batch_size:
        problem = f"{place}: the batch of a step would change with fewer nodes"
        raise UsageError(problem, "Set training.global_batch_size.")
    size = micro_batch(config, layout(config, processes))
    same = training.model_copy(update={"micro_batch_size": size})
    found = []
    for count in range(nodes.min, nodes.count):
        few = nodes.model_copy(update={"count": count})
        with_few = config.model_copy(update={"nodes": few, "training": same})
        if not faults(with_few, layout(with_few, processes), release):
            found.append(count)
    if not found:
        raise UsageError(
            f"{place}: with none of {nodes.min} to {nodes.count - 1} nodes the layout and the "
            "batches of this file work",
            "Leave it out, or set another training.global_batch_size.",
        )
    return tuple(found)


def _world(config: RunConfig, where: Layout) -> Iterator[BrokenRule]:
    """core/parallel_state.py"""
    if where.world % where.model:
        near = neighbours(where.world, where.model)
        product = f"tensor {where.tensor} × pipeline {where.pipeline}"
        if where.context > 1:
            product += f" × context {where.context}"
        key = "gpus" if config.gpus != "0" else "processes"
        yield BrokenRule(
            key,
            f"{where.world} processes aren't divisible by {product} = {where.model}",
            f"Nearest that work: {listed(near)} processes in all.",
        )


def _model(config: RunConfig, where: Layout, release: str | None) -> Iterator[BrokenRule]:
    """core/transformer/transformer_config.py, attention.py; core/tensor_parallel/layers.py"""
    model = config.model
    heads, groups, layers = model.num_attention_heads, model.num_query_groups, model.num_layers
    tensor, pipeline = (f"parallel.{each}_model_parallel_size" for each in ("tensor", "pipeline"))
    if heads and heads % where.tensor:
        yield _indivisible(tensor, where.tensor, "heads", heads)
    shared = config.program != "gpt" and series.has(release, "TP shares query groups")
    if groups and groups % where.tensor and not (shared and where.tensor % groups == 0):
        yield _indivisible(tensor, where.tensor, "query groups", groups)
    if heads and groups and heads % groups:
        yield _indivisible("model.num_query_groups", groups, "heads", heads)
    ffn = model.ffn_hidden_size
    if ffn and ffn % where.tensor:
        yield _indivisible(tensor, where.tensor, "hidden units of the MLP", ffn)
    if model.hidden_size and heads and not model.kv_channels and model.hidden_size % heads:
        yield _indivisible("model.num_attention_heads", heads, "hidden units", model.hidden_size)
    if layers and layers % where.pipeline and not _uneven(config):
        yield _indivisible(pipeline, where.pipeline, "layers", layers)
    virtual = config.parallel.num_layers_per_virtual_pipeline_stage
    if layers and virtual and layers % where.pipeline == 0 and layers // where.pipeline % virtual:
        key = "parallel.num_layers_per_virtual_pipeline_stage"
        yield _indivisible(key, virtual, "layers of a stage", layers // where.pipeline)
    yield from _sequence(config, where)


def _uneven(config: RunConfig) -> bool:
    """True where the file says itself how many layers a stage has."""
    names = {name.replace("-", "_") for name in config.megatron_args}
    return any("pipeline_num_layers" in n or "pipeline_model_parallel_layout" in n for n in names)


def _sequence(config: RunConfig, where: Layout) -> Iterator[BrokenRule]:
    """training/arguments.py; sequence parallelism's: core/tensor_parallel/mappings.py"""
    length, positions = config.model.seq_length, config.model.max_position_embeddings
    if length and positions and positions < length:
        yield BrokenRule(
            "model.max_position_embeddings",
            f"{positions} positions are fewer than the sequence's {length}",
            f"Set it to {length} or more.",
        )
    parts = 2 * where.context if where.context > 1 else 1
    if config.parallel.sequence_parallel:
        parts = lcm(parts, where.context * where.tensor)
    if length and length % parts:
        yield BrokenRule(
            "model.seq_length",
            f"{length} isn't divisible by {parts}, the parts that the processes take",
            f"Nearest that work: {listed(neighbours(length, parts))}.",
        )


def _training(config: RunConfig) -> Iterator[BrokenRule]:
    """training/arguments.py"""
    training = config.training
    for one, other in EXCLUSIVE:
        if getattr(training, one) and getattr(training, other):
            yield BrokenRule(f"training.{other}", f"{one} is set too", "Keep one of the two.")
    if training.lr is not None and training.min_lr is not None and training.min_lr > training.lr:
        yield BrokenRule(
            "training.min_lr",
            f"{training.min_lr} is above the learning rate, {training.lr}",
            "Set it to lr or less.",
        )


def _batches(config: RunConfig, where: Layout) -> Iterator[BrokenRule]:
    """core/num_microbatches_calculator.py"""
    training = config.training
    micro = micro_batch(config, where)
    if training.micro_batch_size == "auto":
        if not training.global_batch_size:
            problem = "auto needs a global batch to divide"
            yield BrokenRule(
                "training.micro_batch_size", problem, "Set training.global_batch_size."
            )
            return
        micro = 1
    if not micro:
        return
    step = micro * where.data
    sizes = [("training.global_batch_size", training.global_batch_size)]
    if training.rampup_batch_size and training.global_batch_size:
        start, increment, _ = training.rampup_batch_size
        key = "training.rampup_batch_size"
        sizes += [(key, start), (key, increment)]
        if (training.global_batch_size - start) % increment:
            problem = f"{training.global_batch_size} isn't reached from {start} by {increment}s"
            near = neighbours(training.global_batch_size - start, increment)
            remedy = f"Nearest global batches that work: {listed([start + n for n in near])}."
            yield BrokenRule(key, problem, remedy)
    for key, size in sizes:
        if size and size % step:
            yield BrokenRule(key, *_no_share(size, micro, where))


def _no_share(size: int, micro: int, where: Layout) -> tuple[str, str]:
    """What to say of a batch that micro-batches can't fill evenly, and what would work."""
    replicas = where.data
    problem = (
        f"a batch of {size} isn't divisible by micro-batch {micro} × {replicas} replicas"
        f" = {micro * replicas}"
    )
    remedy = f"Nearest batches that work: {listed(neighbours(size, micro * replicas))}"
    if size % replicas == 0:
        remedy += f"; or micro-batch {listed(divisors_near(size // replicas, micro))}"
    elif size % micro == 0:
        worlds = [n * where.model for n in divisors_near(size // micro, replicas)]
        remedy += f"; or {listed(worlds)} processes in all"
    return problem, f"{remedy}."


def _indivisible(key: str, parts: int, what: str, whole: int) -> BrokenRule:
    return BrokenRule(
        key,
        f"{whole} {what} aren't divisible by {parts}",
        f"Nearest values of {key} that work: {listed(divisors_near(whole, parts))}.",
    )


def neighbours(value: int, step: int) -> list[int]:
    """The multiples of `step` next to `value`, above 0."""
    below = value // step * step
    return [n for n in (below, below + step) if n > 0]


def divisors(whole: int) -> list[int]:
    """The divisors of `whole`, the smallest first."""
    small = [n for n in range(1, isqrt(whole) + 1) if whole % n == 0]
    return sorted({*small, *(whole // n for n in small)})


def divisors_near(whole: int, value: int) -> list[int]:
    """The divisors of `whole` next to `value`."""
    found = divisors(whole)
    return [n for n in found if n < value][-1:] + [n for n in found if n > value][:1]


def listed(values: list[int]) -> str:
    """'8 or 16'."""
    return " or ".join(str(value) for value in values)
