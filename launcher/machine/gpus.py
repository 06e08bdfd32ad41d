"""Checks of the GPUs: there, able, free, and given to containers by the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launcher.machine.finding import Finding
from launcher.machine.machine import Engine, Gpu, Machine, Use, named
from launcher.plan.config import RunConfig
from launcher.plan.gpus import Gpus

GB = 1e9
BF16 = (8, 0)
"""Compute capability with bf16 arithmetic: CUDA C++ Programming Guide, "Compute Capabilities"."""

TENSOR_CORES = (7, 0)
"""Compute capability with fp16 tensor cores; the same source."""

FP16 = (5, 3)
"""Compute capability with fp16 arithmetic; the same source."""


def chosen(asked: Gpus, there: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs that a request makes visible: those named, all, or the first so many.

    A device that isn't there is left out.
    """
    if asked.devices:
        found = [named(device, there) for device in asked.devices]
        return [gpu for gpu in found if gpu]
    return list(there if asked.everything else there[: asked.count])


def check_there(asked: Gpus, there: Sequence[Gpu]) -> Iterator[Finding]:
    """As many as asked for, and those that are named."""
    if not there:
        yield Finding(
            f"gpus: {asked}, and the driver finds none on this machine",
            "A process needs a GPU of its own.",
            "--gpus 0 trains on the CPU.",
            refuse=True,
        )
        return
    indices = ", ".join(str(gpu.index) for gpu in there)
    for device in asked.devices:
        if named(device, there) is None and not device.upper().startswith("MIG-"):
            yield Finding(
                f"gpus: no device {device} on this machine",
                f"There are {indices}: " + "; ".join(gpu.uuid for gpu in there),
                f"--gpus device={indices.replace(' ', '')}, or fewer of them.",
                refuse=True,
            )
    if not asked.devices and (asked.count or 0) > len(there):
        yield Finding(
            f"gpus: {asked}, and this machine has {len(there)}",
            "Each process needs a GPU of its own, or the ranks wait for one that never comes.",
            f"--gpus {len(there)}",
            refuse=True,
        )


def check_able(config: RunConfig, place: str, visible: Sequence[Gpu]) -> Iterator[Finding]:
    """The compute capability against the precision; `place` is where the run file asks for it."""
    for gpu in _one_of_each(visible):
        if gpu.capability is None:
            continue
        able = ".".join(map(str, gpu.capability))
        what = f"{place}: GPU {gpu.index} is a {gpu.name}, compute capability {able}"
        if config.training.bf16 and gpu.capability < BF16:
            yield Finding(
                what,
                "bf16 needs 8.0 (A100, RTX 30) or newer.",
                "--set training.bf16=false --set training.fp16=true",
                refuse=True,
            )
        if config.training.fp16 and gpu.capability < FP16:
            yield Finding(
                what, "fp16 needs 5.3 or newer.", "--set training.fp16=false", refuse=True
            )
        elif config.training.fp16 and gpu.capability < TENSOR_CORES:
            yield Finding(
                what,
                "Tensor cores for fp16 come with 7.0 (V100): here fp16 saves memory, not time.",
                "Take a newer GPU if there is one.",
                refuse=False,
            )


def _one_of_each(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The first GPU of each name."""
    return list({gpu.name: gpu for gpu in reversed(gpus)}.values())


def check_free(visible: Sequence[Gpu], uses: Sequence[Use]) -> Iterator[Finding]:
    """Other processes on the GPUs that the run will use; a warning, as they may share them."""
    for gpu in visible:
        users = [use for use in uses if use.gpu == gpu.uuid]
        if users:
            yield Finding(
                f"GPU {gpu.index} is in use: {told(users)}",
                "The run shares its memory and its time.",
                "Choose free ones: --gpus device=…",
                refuse=False,
            )


def told(users: Sequence[Use]) -> str:
    """'process 12 (3.2 GB), process 15'."""
    return ", ".join(
        f"process {use.pid}" + (f" ({use.memory / GB:.1f} GB)" if use.memory else "")
        for use in users
    )


def check_engine(engine: Engine) -> Finding | None:
    """Whether the engine can give GPUs to a container."""
    if engine.gpus:
        return None
    sure = engine.gpus is False
    return Finding(
        "the engine has neither NVIDIA's runtime nor CDI devices"
        + ("" if sure else ", as far as it tells"),
        "Without the NVIDIA Container Toolkit it can't give GPUs to a container.",
        "Install the toolkit on its machine, run `nvidia-ctk runtime configure --runtime=docker`,"
        " and restart the engine; or use --gpus 0.",
        refuse=sure,
    )


def check(config: RunConfig, place: str, asked: Gpus, machine: Machine) -> Iterator[Finding]:
    """All of these for a run that asks for GPUs."""
    if machine.engine and (finding := check_engine(machine.engine)):
        yield finding
    if machine.gpus is None:
        return
    yield from check_there(asked, machine.gpus)
    visible = chosen(asked, machine.gpus)
    yield from check_able(config, place, visible)
    yield from check_free(visible, machine.uses)
