"""Predicts the time of a setting's step from a GPU's rates."""

from __future__ import annotations

from launcher.runs.plan import layout
from launcher.runs.plan.render import values_of
from launcher.runs.runfile.config import RunConfig
from launcher.tools.forecast import timing
from launcher.tools.forecast.timing import GpuRates, StepCost, published
from launcher.tools.forecast.work import KERNELS, Work
from launcher.tools.tuning.candidates import Setting, Space

__all__ = ["GpuRates", "StepCost", "precision", "predict", "published"]


def precision(config: RunConfig) -> str:
    """fp16, bf16 or fp32."""
    training = layout.with_precision(config).training
    return "bf16" if training.bf16 else "fp16" if training.fp16 else "fp32"


def work(space: Space, setting: Setting) -> Work:
    """What a setting's run works on."""
    config, where = space.of(setting), space.where(setting)
    kernels = str(config.env.get(KERNELS)) != "0"
    nodes, on_cpu = config.nodes.count, config.gpus == "0"
    return Work(config.program, values_of(config, where), where, nodes, on_cpu, kernels)


def predict(space: Space, setting: Setting, card: GpuRates) -> StepCost | None:
    """The prediction for a setting; None where the model's sizes aren't known."""
    known = space.config.training.global_batch_size
    return timing.step(work(space, setting), card) if known else None
