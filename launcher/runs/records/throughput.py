"""Computes tokens per second, TFLOP/s per GPU, and their share of the peak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launcher.runs.plan import model
from launcher.runs.plan.arguments import Value

A100 = {"fp16": 312, "bf16": 312, "fp32": 19.5}
PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"V100-SXM[23]-(16|32)GB", {"fp16": 125, "fp32": 15.7}),
    (r"V100-PCIE-(16|32)GB", {"fp16": 112, "fp32": 14}),
    (r"V100S-PCIE-32GB", {"fp16": 130, "fp32": 16.4}),
    (r"T4", {"fp16": 65, "fp32": 8.1, "memory": 0.32}),
    (r"A10", {"fp16": 125, "bf16": 125, "fp32": 31.2}),
    (r"A30", {"fp16": 165, "bf16": 165}),
    (r"A40", {"fp16": 149.7, "bf16": 149.7, "fp32": 37.4, "memory": 0.696}),
    (r"A100-SXM4-40GB", A100 | {"memory": 1.555, "link": 600}),
    (r"A100-SXM4-80GB", A100 | {"memory": 2.039, "link": 600}),
    (r"A100(-SXM4-.*|-PCIE-.*| 80GB PCIe)", A100),
    (r"RTX A6000", {"fp16": 154.8, "bf16": 154.8, "fp32": 38.7}),
    (r"GeForce RTX 3090", {"fp16": 71, "bf16": 71, "fp32": 35.6}),
    (r"GeForce RTX 4090", {"fp16": 165.2, "bf16": 165.2, "fp32": 82.6}),
    (r"L4", {"fp16": 121, "bf16": 121, "fp32": 30.3, "memory": 0.3}),
    (r"L40", {"fp16": 181.05, "bf16": 181.05, "fp32": 90.5, "memory": 0.864}),
    (r"L40S", {"fp16": 362.05, "bf16": 362.05, "fp32": 91.6, "memory": 0.864}),
    (r"H100 PCIe", {"fp16": 756, "bf16": 756, "fp32": 51.2}),
    (r"H100 NVL", {"fp16": 835.5, "bf16": 835.5, "fp32": 60}),
    (r"H100 80GB HBM3", {"fp16": 989.4, "bf16": 989.4, "fp32": 66.9, "memory": 3.35, "link": 900}),
    (r"H200", {"fp16": 989.5, "bf16": 989.5, "fp32": 67, "memory": 4.8, "link": 900}),
    (r"H200 NVL", {"fp16": 835.5, "bf16": 835.5, "fp32": 60}),
    (r"B200", {"fp16": 2250, "bf16": 2250, "fp32": 75, "memory": 8, "link": 1800}),
)
"""Dense TFLOP/s by the names that nvidia-smi prints, without their NVIDIA or Tesla.

fp16 and bf16 are those of the tensor cores that sum in fp32, as training does; fp32 is without
TF32; memory is its bandwidth in TB/s, and link that of NVLink in GB/s, both ways. Where NVIDIA
prints a number "with sparsity", it is halved here. A precision that a GPU lacks, or whose number
wasn't found, is left out, as are GPUs without a public one (H20). From NVIDIA's

- V100 datasheet (volta-v100-datasheet-update-us-1165301-r5), T4 datasheet (951643)
- A10 datasheet, A30 datasheet, A40 datasheet, A100 datasheet (1758950-r4)
- Ampere GA102 whitepaper v2.1, table 3 (RTX A6000) and appendix A (RTX 3090)
- Ada whitepaper v2.1, appendix A (RTX 4090); L4 datasheet (2595652), L40 and L40S datasheets
- H100 whitepaper v1.04, table 3; H100 product page (NVL, halved); H200 datasheet (halved)
- Blackwell datasheet, HGX B200 (halved)
"""


@dataclass(frozen=True)
class StepWork:
    """What a step works on: `batch` sequences of a model, on `world` processes."""

    model: model.ModelShape
    batch: int
    world: int
    precision: str = "fp32"


@dataclass(frozen=True)
class Rates:
    """How fast a step was: tokens on all GPUs together, TFLOP/s on each, 0 to 1 of its peak."""

    tokens_per_s: float
    tflops_per_gpu: float
    mfu: float | None = None


def step_of(plan: Mapping[str, Any], vocabulary: int | None = None) -> StepWork | None:
    """The steps of a plan as it is kept; None where the model, or the batch, isn't known.

    `vocabulary` is the padded one, where the log has it.
    """
    options = plan.get("options") or {}  # an older launcher kept none
    world = plan["nodes"] * plan["processes_per_node"]
    shape = model.shape(plan.get("program", ""), options, vocabulary)
    if shape is None:
        return None
    try:
        return StepWork(shape, _batch(options, world), world, _precision(options))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _batch(options: Mapping[str, Value], world: int) -> int:
    """Sequences in a step: one micro-batch on each replica where no global batch is given."""
    if "global_batch_size" in options:
        return model.whole(options, "global_batch_size")
    for size in ("tensor_model", "pipeline_model", "context"):
        world //= model.whole(options, f"{size}_parallel_size", 1)
    return model.whole(options, "micro_batch_size") * world


def _precision(options: Mapping[str, Value]) -> str:
    if any(option.startswith(("fp8", "fp4")) for option in options):
        return "fp8"
    return next((name for name in ("bf16", "fp16") if name in options), "fp32")


def rates(step: StepWork, ms: float, gpu_name: str | None = None) -> Rates | None:
    """The rates of steps of `ms` milliseconds; mfu is None where the GPU's peak isn't known.

    None for a time that is no time. Where the batch grows in a run, give `step` the step's.
    """
    seconds = ms / 1000
    if not 0 < seconds < float("inf"):
        return None
    tflops = step.model.operations(step.batch) / seconds / step.world / 1e12
    most = peak(gpu_name, step.precision) if gpu_name else None
    return Rates(
        tokens_per_s=step.batch * step.model.sequence / seconds,
        tflops_per_gpu=tflops,
        mfu=tflops / most if most else None,
    )


def peak(name: str, precision: str) -> float | None:
    """The dense TFLOP/s of a GPU by its name, in fp16, bf16 or fp32; None where not known.

    For "memory" it is its bandwidth in TB/s, for "link" NVLink's in GB/s.
    """
    plain = re.sub(r"^(NVIDIA |Tesla )+", "", name.strip())
    if "MIG" in plain:
        return None
    for pattern, peaks in PEAKS:
        if re.fullmatch(pattern, plain, re.IGNORECASE):
            return peaks.get(precision)
    return None
