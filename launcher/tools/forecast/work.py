"""What a run works on: its program, options and layout, from a run file or from a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from launcher.runs.checks import memory
from launcher.runs.plan import model_size
from launcher.runs.plan.layout import Layout
from launcher.runs.plan.model_size import ModelShape
from launcher.runs.plan.program_options import Value
from launcher.runs.plan.resolved import Resolved

KERNELS = "LAUNCHER_KERNELS"

SCHEDULE = (
    "train_iters train_samples lr min_lr lr_decay_style lr_decay_iters lr_decay_samples "
    "lr_warmup_fraction lr_warmup_iters lr_warmup_samples weight_decay adam_beta1 adam_beta2 "
    "adam_eps clip_grad seed save load save_interval log_interval eval_interval eval_iters "
    "tensorboard_dir tensorboard_log_interval wandb_project wandb_exp_name wandb_save_dir "
    "exit_interval exit_signal_handler check_replicas_interval split mock_data data_path "
    "data_cache_path rampup_batch_size performance_summary init_method_std"
).split()
"""Options that change neither a step's time nor its memory, or hardly."""

ALIKE = 150
"""Steps at the start of a training in which all tokens of a text choose the same experts, as far as
what follows has the same mean: by tokens counted on H200s (bench/gpu/README.md, "Routing")."""


@dataclass(frozen=True)
class Work:
    """A run by its program, options (plain names) and layout. Pure.

    nodes: machines; kernels: whether LAUNCHER_KERNELS leaves the layers to our kernels; keep: the
    newest checkpoints that are kept, None for all.
    """

    program: str
    options: Mapping[str, Value] = field(hash=False)
    where: Layout
    nodes: int = 1
    on_cpu: bool = False
    kernels: bool = True
    keep: int | None = None

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model's sizes; None where they aren't known."""
        return model_size.shape(self.program, self.options)

    def memory(self, capability: tuple[int, int] | None = None) -> memory.MemoryEstimate | None:
        """Bytes on the GPU that needs most, which has this compute capability."""
        return memory.needed(self.program, self.options, self.where, capability, self.kernels)

    def number(self, name: str, default: int = 0) -> int:
        """An option as a whole number; the default where it is none."""
        try:
            return model_size.whole(self.options, name, default)
        except (OverflowError, TypeError, ValueError):
            return default

    @property
    def micro(self) -> int:
        """Sequences of a micro-batch; 0 where that isn't known."""
        return self.number("micro_batch_size")

    @property
    def batch(self) -> int:
        """Sequences of a step on all replicas: one micro-batch on each where none is given."""
        return self.number("global_batch_size") or self.micro * self.where.data

    @property
    def count(self) -> int:
        """Micro-batches of a step on each replica."""
        return max(1, self.batch // max(1, self.micro * self.where.data))

    @property
    def precision(self) -> str:
        """fp16, bf16 or fp32."""
        return next((name for name in ("bf16", "fp16") if name in self.options), "fp32")

    @property
    def experts_over(self) -> int:
        """Ranks that the model's experts are divided among: 1 for those of a dense model."""
        over = self.number("expert_model_parallel_size", 1)
        return over if self.shape and self.shape.experts else 1

    @property
    def learns_routing(self) -> bool:
        """Whether its tokens aren't made up, and its routers begin untrained."""
        return not self.options.keys() & {"mock_data", "finetune", "pretrained_checkpoint"}

    @property
    def steps(self) -> int:
        """Steps of the whole run; 0 where that isn't known. A growing batch counts as it grows."""
        if iterations := self.number("train_iters"):
            return iterations
        samples, ramp = self.number("train_samples"), self.options.get("rampup_batch_size")
        if not (samples and self.batch):
            return 0
        if not (isinstance(ramp, list) and len(ramp) == 3):
            return samples // self.batch
        start, increment, over = map(int, ramp)
        stages = max(1, (self.batch - start) // max(1, increment))
        growing = sum(over // stages // (start + n * increment) for n in range(stages))
        return growing + max(0, samples - over) // self.batch

    @property
    def samples(self) -> int:
        """Sequences of the whole run; 0 where that isn't known."""
        return self.number("train_samples") or self.steps * self.batch

    @property
    def saves(self) -> int:
        """Checkpoints that the whole run writes, the last one included."""
        if not (self.options.get("save") and self.steps):
            return 0
        every = self.number("save_interval")
        return (self.steps - 1) // every + 1 if every else 1

    @property
    def evaluations(self) -> int:
        """Evaluations of the whole run, the last one included."""
        every, iterations = self.number("eval_interval", 1000), self.number("eval_iters", 100)
        return (self.steps - 1) // every + 1 if every and iterations and self.steps else 0

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for two runs whose steps do the same, or more than half of them."""
        rest = {name: str(self.options[name]) for name in self.options.keys() - {*SCHEDULE}}
        routed = self.experts_over > 1 and self.learns_routing and 0 < self.steps <= 2 * ALIKE
        return (self.program, self.where, self.nodes, self.kernels, routed, *sorted(rest.items()))


def of_resolved(resolved: Resolved) -> Work:
    """The work of a run file that has been resolved."""
    config = resolved.config
    return Work(
        config.program,
        resolved.values,
        resolved.layout,
        config.nodes.count,
        resolved.gpus.count == 0,
        str(config.env.get(KERNELS)) != "0",
        config.checkpoint.keep,
    )


def of_record(plan: Mapping[str, Any], config: Mapping[str, Any]) -> Work:
    """The work of a run by its kept plan and run file; raises what a foreign record raises."""
    options: Mapping[str, Value] = plan.get("options") or {}
    nodes, each = plan["nodes"], plan["processes_per_node"]
    if not (isinstance(plan["program"], str) and range(nodes) and range(each)):
        raise ValueError("a plan without processes")
    sizes = ("tensor_model", "pipeline_model", "context")
    split = [model_size.whole(options, f"{size}_parallel_size", 1) for size in sizes]
    return Work(
        plan["program"],
        options,
        Layout(nodes * each, *split),
        nodes,
        plan["gpus"]["count"] == 0,
        str(dict(plan["env"]).get(KERNELS)) != "0",
        (config.get("checkpoint") or {}).get("keep"),
    )
