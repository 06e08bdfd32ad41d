"""Computes tokens per second, TFLOP/s per GPU, and their share of the peak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from launcher.base import yamlfile
from launcher.runs.plan import model_size
from launcher.runs.plan.program_options import Value


@dataclass(frozen=True)
class Card:
    """A GPU as it is published: a row of cards.yaml, which says what its numbers are."""

    name: str
    source: str
    rates: Mapping[str, float]
    capability: tuple[int, int]
    alias: str = ""
    gb: float = 0
    network: float | None = None


@lru_cache(maxsize=1)
def cards() -> tuple[Card, ...]:
    """The rows of cards.yaml."""
    text = Path(__file__).with_name("cards.yaml").read_text(encoding="utf-8")
    rows = yaml.load(text, yamlfile.Loader)  # noqa: S506 - the safe one, in C
    return tuple(Card(**row | {"capability": tuple(row["capability"])}) for row in rows)


@lru_cache
def card(name: str) -> Card | None:
    """The GPU that nvidia-smi calls so, or that has this alias; None where nothing is published."""
    plain = re.sub(r"^(NVIDIA |Tesla )+", "", name.strip())
    if "MIG" in plain:
        return None
    known = (one for one in cards() if re.fullmatch(f"{one.name}|{one.alias}", plain, re.I))
    return next(known, None) if plain else None


@dataclass(frozen=True)
class StepWork:
    """What a step works on: `batch` sequences of a model, on `world` processes."""

    model: model_size.ModelShape
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
    """A kept plan's steps, None if unknown; `vocabulary` is the padded one, where a log has it."""
    options = plan.get("options") or {}  # an older launcher kept none
    world = plan["nodes"] * plan["processes_per_node"]
    shape = model_size.shape(plan.get("program", ""), options, vocabulary)
    if shape is None:
        return None
    try:
        return StepWork(shape, _batch(options, world), world, _precision(options))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _batch(options: Mapping[str, Value], world: int) -> int:
    """Sequences in a step: one micro-batch on each replica where no global batch is given."""
    if "global_batch_size" in options:
        return model_size.whole(options, "global_batch_size")
    for size in ("tensor_model", "pipeline_model", "context"):
        world //= model_size.whole(options, f"{size}_parallel_size", 1)
    return model_size.whole(options, "micro_batch_size") * world


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
    """A GPU's dense TFLOP/s in fp16, bf16 or fp32; of "memory" TB/s, of "link" GB/s; or None."""
    found = card(name)
    return found.rates.get(precision) if found else None
