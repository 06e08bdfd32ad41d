"""The settings that a tune may try without changing the run's mathematics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.runs.checks import memory
from launcher.runs.checks.checks import BF16
from launcher.runs.checks.fit import MARGIN
from launcher.runs.plan import layout
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.model_size import GPT, PADDING, UPSTREAM
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Override, overridden

MICRO = "training.micro_batch_size"
TENSOR = "parallel.tensor_model_parallel_size"
PIPELINE = "parallel.pipeline_model_parallel_size"
VIRTUAL = "parallel.num_layers_per_virtual_pipeline_stage"
SEQUENCE = "parallel.sequence_parallel"
PADDED = "model.make_vocab_size_divisible_by"
WORKERS = "data.num_workers"
NO_FAST, KERNELS = "megatron_args.no_fast", "env.LAUNCHER_KERNELS"

LARGEST_MICRO = 64
MOST_TENSOR = 8
"""Processes that split a layer: no more than the GPUs of one machine, over their fast links."""

SettingChanges = Mapping[str, object]
"""Values by dotted keys of a run file; None takes a key out."""


@dataclass(frozen=True)
class Setting:
    """What is changed of a run file, sorted by key; nothing is what was given."""

    changes: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        words = [_told(key.partition(".")[2], value) for key, value in self.changes]
        return ", ".join(words) or "as given"


def _told(name: str, value: object) -> str:
    return f"no {name}" if value is None else name if value is True else f"{name} {value}"


@dataclass(frozen=True)
class Space:
    """A run whose `auto` is settled, on `processes` of each node, and what may be changed of it.

    capability, total: of its smallest GPU, as far as known; the total in bytes
    """

    config: RunConfig
    processes: int
    capability: tuple[int, int] | None = None
    total: int = 0
    any_precision: bool = False

    def of(self, setting: Setting) -> RunConfig:
        """The run file with the setting's changes."""
        return overridden(self.config, [Override("tune", dict(setting.changes))])

    def where(self, setting: Setting) -> Layout:
        """How the setting is spread over the processes."""
        return layout.layout(self.of(setting), self.processes)

    def changed(self, setting: Setting, changes: SettingChanges) -> Setting:
        """The setting with further changes; what is as given isn't one."""
        every = {**dict(setting.changes), **changes}
        kept = {key: value for key, value in every.items() if not self._is_given(key, value)}
        return Setting(tuple(sorted(kept.items())))

    def _is_given(self, key: str, value: object) -> bool:
        section, _, name = key.partition(".")
        part = getattr(self.config, section)
        given = part.get(name) if isinstance(part, dict) else getattr(part, name)
        given = 1 if given is None and key in (TENSOR, PIPELINE) else given
        return (given or None) == (value or None)

    def why_not(self, setting: Setting) -> str:
        """Why a setting can't work, by the field's rules and the memory that it needs; "" else."""
        config = self.of(setting)
        where = layout.layout(config, self.processes)
        if found := layout.faults(config, where):
            return found[0].problem
        needed = memory.estimate(config, where, self.capability)
        if self.total and needed and needed.total > self.total * (1 - MARGIN):
            return f"needs about {needed.total / 1e9:.1f} GB of {self.total / 1e9:.1f}"
        return ""

    def axes(self) -> dict[str, list[SettingChanges]]:
        """What may be changed: each axis with its values, of which one is as given."""
        on_gpus, upstream = self.config.gpus != "0", self.config.program == UPSTREAM
        world = self.processes * self.config.nodes.count
        found: dict[str, list[SettingChanges]] = {
            "precision": list(self._precisions()),
            "micro-batch": list(self._micro_batches()),
            "layout": list(self._layouts(world)),
            "recomputing": self._recomputing(upstream),
            "data parallelism": self._sharing() if world > 1 else [],
            "loader": [{}, {WORKERS: 4}] if on_gpus else [],  # for which nothing is compiled anew
            "fast path": [{NO_FAST: None}, {NO_FAST: True}] if on_gpus and not upstream else [],
            "kernels": self._kernels() if on_gpus and not upstream else [],
            "fusions": self._fusions() if on_gpus and upstream else [],
            "loss": [{FUSED_LOSS: True}, {FUSED_LOSS: None}] if on_gpus and upstream else [],
        }
        return {name: values for name, values in found.items() if len(values) > 1}

    def _micro_batches(self) -> Iterator[SettingChanges]:
        training = self.config.training
        whole, given = training.global_batch_size, training.micro_batch_size
        if whole and isinstance(given, int):
            for size in layout.divisors(whole):
                if size <= max(LARGEST_MICRO, given):
                    yield {MICRO: size}

    def _kernels(self) -> list[SettingChanges]:
        """Ours for layers like GPT-2's, which were made on an H100, or what torch compiles."""
        return [{KERNELS: None}, {KERNELS: "0"}] if like_gpt2(self.config) else []

    def _sharing(self) -> list[SettingChanges]:
        """How replicas share their gradients; the distributed optimizer is for GPUs."""
        known = SHARING if self.config.program == UPSTREAM else OURS_SHARING
        return known if self.config.gpus != "0" else known[:2]

    def _recomputing(self, upstream: bool) -> list[SettingChanges]:
        """Where it is given, or the smallest micro-batch doesn't fit without; ours is full."""
        given = {name for name in self.config.megatron_args if name.startswith("recompute")}
        if not (given or self.why_not(self.changed(Setting(), {MICRO: 1}))):
            return []
        kinds = (None, "selective", "full") if upstream else (None, "full")
        return [_recompute(kind) for kind in kinds]

    def _precisions(self) -> Iterator[SettingChanges]:
        training = self.config.training
        halved = training.fp16 or training.bf16
        if self.any_precision and halved and self.capability and self.capability >= BF16:
            yield {"training.bf16": True, "training.fp16": None}
            yield {"training.fp16": True, "training.bf16": None}

    def _layouts(self, world: int) -> Iterator[SettingChanges]:
        """Each tensor × pipeline, with the vocabulary padded as it is given."""
        given = layout.layout(self.config, self.processes)
        parallel, padded = self.config.parallel, self.config.model.make_vocab_size_divisible_by
        virtual = parallel.num_layers_per_virtual_pipeline_stage
        padding = (padded or PADDING) * given.tensor
        for tensor in layout.divisors(min(self.processes, MOST_TENSOR)):
            for pipeline in layout.divisors(world):
                if world % (tensor * pipeline * given.context) or padding % tensor:
                    continue
                same, split = tensor == given.tensor, tensor > 1 or None
                yield {
                    TENSOR: tensor,
                    PIPELINE: pipeline,
                    SEQUENCE: parallel.sequence_parallel if same else split,
                    PADDED: padded if same else padding // tensor,
                    VIRTUAL: virtual if pipeline == given.pipeline else None,
                }

    def _fusions(self) -> list[SettingChanges]:
        """What is turned off for want of Apex or Transformer Engine: without, a run just ends."""
        off = [key for key in FUSIONS if self.config.megatron_args.get(key.partition(".")[2])]
        local = self.config.megatron_args.get("transformer_impl") == "local"
        off += ["megatron_args.transformer_impl"] * local
        off += ["model.transformer_impl"] * (self.config.model.transformer_impl == "local")
        return [{}, dict.fromkeys(off)] if off else []


def like_gpt2(config: RunConfig) -> bool:
    """Whether its layers are those that there are kernels of ours for."""
    known = config.model
    return not known.swiglu and known.position_embedding_type in (None, "learned_absolute")


def _recompute(granularity: str | None) -> SettingChanges:
    full = granularity == "full"
    return {
        "megatron_args.recompute_activations": None,
        "megatron_args.recompute_granularity": granularity,
        "megatron_args.recompute_method": "uniform" if full else None,
        "megatron_args.recompute_num_layers": 1 if full else None,
    }


FUSED_LOSS = "megatron_args.cross_entropy_loss_fusion"
FUSIONS = tuple(
    f"megatron_args.{name}"
    for name in "no_gradient_accumulation_fusion no_masked_softmax_fusion no_persist_layer_norm "
    "no_bias_gelu_fusion no_bias_swiglu_fusion no_bias_dropout_fusion no_rope_fusion".split()
)


def _share(distributed: bool, overlap: bool, *names: str) -> SettingChanges:
    both = {"use_distributed_optimizer": distributed, "overlap_grad_reduce": overlap}
    both |= dict.fromkeys(names, distributed)
    return {f"parallel.{name}": True if on else None for name, on in both.items()}


SHARING = [
    _share(distributed, overlap, "overlap_param_gather")
    for distributed, overlap in ((False, False), (False, True), (True, True))
]
OURS_SHARING = [_share(shared, overlap) for shared in (False, True) for overlap in (False, True)]


def combinations(
    space: Space, start: Setting, axes: Sequence[list[SettingChanges]]
) -> list[Setting]:
    """All settings that these axes give together, as far as they can work."""
    found = [start]
    for axis in axes:
        found = [space.changed(one, changes) for one in found for changes in axis]
    return [one for one in dict.fromkeys(found) if not space.why_not(one)]


def supported(program: str) -> bool:
    """Whether a program's options are known well enough to be changed."""
    return program in (GPT, UPSTREAM)
