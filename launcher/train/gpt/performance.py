"""A run in a few numbers, as JSON: steps, time, tokens/s, memory, loss, layout, versions."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.train.gpt.arguments import Layout, UsageError
from launcher.train.ranks.ending import RunError


def check(file: str) -> None:
    """Raises `UsageError` where the summary's folder can't be written: before the training."""
    folder = Path(file).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        what = "can't be written" if folder.is_dir() else "isn't there"
        raise UsageError(f"--performance-summary: the folder {folder} {what}")


def summary(
    arguments: argparse.Namespace,
    layout: Layout,
    seconds: Sequence[float],
    loss: float,
    memory: Mapping[str, int],
) -> dict[str, Any]:
    """What is told of a run whose steps took `seconds`, of all ranks together.

    `loss` is the last step's, `memory` the most that any rank had, in bytes. The median leaves
    out what the first step does once. What isn't known is None.
    """
    median = statistics.median(seconds) if seconds else None
    tokens = arguments.global_batch_size * arguments.seq_length
    return {
        "steps": len(seconds),
        "ms_per_step_median": None if median is None else 1000.0 * median,
        "tokens_per_second": None if median is None else tokens / median,
        "max_memory_bytes": dict(memory),
        "final_loss": loss if math.isfinite(loss) else None,
        "layout": {
            "world_size": layout.tensor * layout.pipeline * layout.data,
            "tensor": layout.tensor,
            "pipeline": layout.pipeline,
            "data": layout.data,
            "micro_batch_size": arguments.micro_batch_size,
            "global_batch_size": arguments.global_batch_size,
        },
        "precision": "fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "fp32",
        "device": "CPU" if arguments.on_cpu else _device(),
        "versions": _versions(),
    }


def _device() -> str:
    import torch

    return str(torch.cuda.get_device_name())


def _versions() -> dict[str, str | None]:
    import torch
    from megatron.core.package_info import __version__

    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "megatron_core": __version__,
    }


def write(summary: Mapping[str, Any], file: Path) -> str:
    """Write the JSON file; the line to say of it. Raises `RunError` where it can't be written."""
    try:
        file.write_text(json.dumps(summary, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"can't write to {file}: {error.strerror}") from error
    if not summary["steps"]:
        return f"wrote {file}: no steps"
    return (
        f"wrote {file}: {summary['steps']} steps, {summary['ms_per_step_median']:.1f} ms a step, "
        f"{summary['tokens_per_second']:.0f} tokens/s"
    )
