"""What `auto` in a run file comes to on the GPUs that the run is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.runs.checks import memory
from launcher.runs.checks.checks import BF16
from launcher.runs.checks.fit import MARGIN
from launcher.runs.checks.machine import GB, Gpu
from launcher.runs.plan import layout
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.source import Override, overridden

LEAST = 16 * GB
"""Of a GPU that isn't known: a V100's, the smallest that Megatron is trained on."""

TURING, MOST_TURING = (7, 5), 48 * GB
"""The newest GPUs without bf16, and the memory of the largest, the Quadro RTX 8000."""

NOT_KNOWN = "those of the run aren't known here"
UNKNOWN = {
    "fp16": f"which every GPU since Volta has: {NOT_KNOWN}",
    "bf16": f"which all GPUs that hold the model have: {NOT_KNOWN}",
}


def settled(
    config: RunConfig, processes: int, visible: Sequence[Gpu]
) -> tuple[RunConfig, list[str]]:
    """`config` without `auto` where the GPUs decide, and what to tell of it.

    `visible` are the GPUs of the run, as far as they are known. A micro-batch that the global
    batch and the layout alone decide stays `auto`.
    """
    if visible:
        able = all(gpu.capability and gpu.capability >= BF16 for gpu in visible)
    else:
        able = _only_newer_hold(config, processes)
    made = layout.settled(config, bf16=able)
    notes = []
    if config.training.precision == "auto" and config.gpus != "0":
        given = "bf16" if made.training.bf16 else "fp16"
        why = " and ".join(dict.fromkeys(gpu.name for gpu in visible))
        notes = [f"training.precision: auto is {given}, {f'by {why}' if why else UNKNOWN[given]}"]
    decided = made.training.micro_batch_size != "auto" or config.gpus == "0"
    if decided or layout.faults(made, processes):
        return made, notes
    total = min((gpu.total for gpu in visible), default=LEAST)
    where = layout.layout(made, processes)
    sizes = list(_micro_batches(made, where, visible[0].capability if visible else None))
    fitting = [size for size, needed in sizes if needed <= total * (1 - MARGIN)]
    if not sizes or not total or fitting[:1] == [sizes[0][0]]:
        return made, notes
    size, most = (fitting or [sizes[-1][0]])[0], sizes[0]
    has = "the GPU has" if visible else "those of the run, unknown here, are taken to have"
    why = f"{most[0]} needs about {most[1] / GB:.1f} GB, and {has} {total / GB:.1f}"
    if not (visible or fitting):
        why = f"the smallest, which needs about {sizes[-1][1] / GB:.1f} GB; {NOT_KNOWN}"
    notes.append(f"training.micro_batch_size: auto is {size}: {why}")
    return _by(made, size), notes


def _by(config: RunConfig, size: int) -> RunConfig:
    """`config` with micro-batches of `size`."""
    return overridden(config, [Override("", {"training.micro_batch_size": size})])


def _only_newer_hold(config: RunConfig, processes: int) -> bool:
    """Whether no GPU without bf16 has the memory for `config`."""
    made = layout.settled(config)
    if made.training.micro_batch_size == "auto":
        made = _by(made, 1)
    if layout.faults(made, processes):
        return False
    needed = memory.estimate(made, layout.layout(made, processes), TURING)
    return needed is not None and needed.total > MOST_TURING * (1 - MARGIN)


def _micro_batches(
    config: RunConfig, where: layout.Layout, capability: tuple[int, int] | None
) -> Iterator[tuple[int, int]]:
    """The sizes that `auto` may be, the largest first, with the bytes on a GPU; none if unknown."""
    largest = layout.micro_batch(config, where) or 1
    for size in reversed(layout.divisors(largest)):
        if needed := memory.estimate(_by(config, size), where, capability):
            yield size, needed.total
