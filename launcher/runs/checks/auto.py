"""Decides what `auto` in a run file means on the GPUs of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.runs.checks import memory
from launcher.runs.checks.checks import BF16
from launcher.runs.checks.fit import MARGIN
from launcher.runs.checks.machine import GB, Gpu
from launcher.runs.plan import layout
from launcher.runs.plan.resolved import Resolved
from launcher.runs.runfile.config import RunConfig

LEAST = 16 * GB
"""Of a GPU that isn't known: a V100's, the smallest that Megatron is trained on."""

TURING, MOST_TURING = (7, 5), 48 * GB
"""The newest GPUs without bf16, and the memory of the largest, the Quadro RTX 8000."""

NOT_KNOWN = "the run's GPUs aren't known here"
UNKNOWN = {
    "fp16": f"which every GPU since Volta supports: {NOT_KNOWN}",
    "bf16": f"which all GPUs that are large enough for the model support: {NOT_KNOWN}",
}


def is_open(config: RunConfig) -> bool:
    """Whether the GPUs decide anything of a run file."""
    training = config.training
    return training.precision is not None or training.micro_batch_size == "auto"


def decide(resolved: Resolved, visible: Sequence[Gpu]) -> tuple[Resolved, list[str]]:
    """The run without `auto` where the GPUs decide, and what to report about it.

    `visible` are the GPUs of the run, as far as they are known. A micro-batch that the global
    batch and the layout alone decide stays `auto` in the run file. What is kept of a run, and goes
    on, is what was decided.
    """
    if not is_open(resolved.config):
        return resolved, []
    bf16, notes = False, list[str]()
    if resolved.config.training.precision == "auto" and resolved.config.gpus != "0":
        training = resolved.config.training
        is_given = bool(training.fp16 or training.bf16)
        bf16 = not is_given and _has_bf16(resolved, visible)
        resolved = resolved.with_bf16() if bf16 else resolved
        given = "bf16" if resolved.values.get("bf16") else "fp16"
        why = " and ".join(dict.fromkeys(gpu.name for gpu in visible))
        why = f"by {why}" if why else UNKNOWN[given]
        why = "which the run file sets" if is_given else why
        notes = [f"training.precision: auto is {given}, {why}"]
    resolved = resolved.with_config(layout.with_precision(resolved.config, bf16))
    decided = resolved.config.training.micro_batch_size != "auto" or resolved.config.gpus == "0"
    if decided or resolved.faults:
        return resolved, notes
    total = min((gpu.total for gpu in visible), default=LEAST)
    sizes = list(_micro_batches(resolved, visible[0].capability if visible else None))
    fitting = [size for size, needed in sizes if needed <= total * (1 - MARGIN)]
    if not sizes or not total or fitting[:1] == [sizes[0][0]]:
        return resolved, notes
    size, most = (fitting or [sizes[-1][0]])[0], sizes[0]
    has = "the GPU has" if visible else "the run's GPUs aren't known here, but have at least"
    why = f"{most[0]} needs about {most[1] / GB:.1f} GB, and {has} {total / GB:.1f}"
    if not (visible or fitting):
        why = f"the smallest, which needs about {sizes[-1][1] / GB:.1f} GB; {NOT_KNOWN}"
    notes.append(f"training.micro_batch_size: auto is {size}: {why}")
    return resolved.with_micro_batch(size), notes


def _has_bf16(resolved: Resolved, visible: Sequence[Gpu]) -> bool:
    """Whether the GPUs have bf16; where none is known, whether none without it holds the model."""
    if visible:
        return all(gpu.capability and gpu.capability >= BF16 for gpu in visible)
    if resolved.faults:
        return False
    smallest = (
        resolved.with_micro_batch(1)
        if resolved.config.training.micro_batch_size == "auto"
        else resolved
    )
    needed = memory.needed(resolved.config.program, smallest.values, resolved.layout, TURING)
    return needed is not None and needed.total > MOST_TURING * (1 - MARGIN)


def _micro_batches(
    resolved: Resolved, capability: tuple[int, int] | None
) -> Iterator[tuple[int, int]]:
    """The sizes that `auto` may be, the largest first, with the bytes on a GPU; none if unknown."""
    largest = resolved.values.get("micro_batch_size")
    for size in reversed(layout.divisors(largest)) if isinstance(largest, int) else ():
        values = {**resolved.values, "micro_batch_size": size}
        if needed := memory.needed(resolved.config.program, values, resolved.layout, capability):
            yield size, needed.total
