"""How fast a run is: the steps of its plan, their rates, and the peaks of GPUs."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from launcher.runs.records.throughput import StepWork, peak, rates, step_of
from tests.plans import Planner
from tests.runs.plan.test_model_size import GPT2 as SHAPE
from tests.tables import table

GPT2 = StepWork(SHAPE, batch=16, world=1, precision="bf16")


@pytest.mark.parametrize(
    ("sets", "world", "batch", "precision"),
    [
        ((), 1, 16, "fp16"),
        (("training.global_batch_size=64", "training.precision=fp32"), 1, 64, "fp32"),
        (("program=pretrain_gpt.py", "gpus=8", "parallel.tensor_model_parallel_size=2",
          "parallel.context_parallel_size=2", "training.global_batch_size=null",
          "training.micro_batch_size=4"), 8, 8,
         "fp16"),
        (("program=pretrain_gpt.py", "megatron_args.fp8_format=hybrid"), 1, 16, "fp8"),
    ],
)  # fmt: skip
def test_the_steps_of_a_plan(
    plan: Planner, sets: tuple[str, ...], world: int, batch: int, precision: str
) -> None:
    step = step_of(asdict(plan("gpt2", *sets)))
    assert step
    assert (step.world, step.batch, step.precision) == (world, batch, precision)
    rest = ("--moe-router-topk", "3", "--num-experts=8")  # what is behind dashes counts
    step = step_of(asdict(plan("gpt2", "program=pretrain_gpt.py", rest=rest)))
    assert step
    assert (step.model.expert_layers, step.model.routed) == (12, 3)


@table("changed")
def test_no_step(plan: Planner, changed: dict[str, Any]) -> None:
    """A plan that an older launcher kept has no options."""
    kept = asdict(plan("gpt2"))
    if changed.get("options"):
        changed = {"options": kept["options"] | changed["options"]}
    assert step_of(kept | changed) is None
    del kept["options"], kept["program"]
    assert step_of(kept) is None


def test_rates() -> None:
    found = rates(GPT2, 82.1, "NVIDIA H100 80GB HBM3")
    assert found
    assert found.tokens_per_s == pytest.approx(8192 / 0.0821)
    assert found.tflops_per_gpu == pytest.approx(79.63, abs=0.01)  # 6.537 in 0.0821 s
    assert found.mfu == pytest.approx(79.63 / 989.4, abs=1e-4)
    two = rates(replace(GPT2, world=2), 82.1, "NVIDIA H100 80GB HBM3")
    assert two
    assert (two.tokens_per_s, two.tflops_per_gpu) == (found.tokens_per_s, found.tflops_per_gpu / 2)
    for name in ("NVIDIA H20", None):
        unknown = rates(GPT2, 82.1, name)
        assert unknown
        assert unknown.mfu is None
    assert [rates(GPT2, ms) for ms in (0.0, -1.0, float("nan"), float("inf"))] == [None] * 4


@table("name", "precision", "tflops")
def test_peaks(name: str, precision: str, tflops: float | None) -> None:
    assert peak(name, precision) == tflops
