"""Whether the image's torch has code for the GPUs that are visible."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

ARCH = r"(sm|compute)_(\d+)(\d)([af]?)"


@dataclass(frozen=True)
class Device:
    """A GPU: its name and its compute capability, major and minor."""

    name: str
    capability: tuple[int, int]


def able(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Whether a GPU can run code made for `arch_list`, as torch.cuda.get_arch_list() gives it.

    sm_86 runs on the same major capability from that minor on; compute_86 is compiled on any
    GPU from 8.6 on; a trailing a holds for exactly this capability. A list with neither, of
    another maker's GPUs or of a torch for the CPU, says nothing, and is no reason to refuse.
    https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/#gpu-compilation
    """
    known = [match for arch in arch_list if (match := re.fullmatch(ARCH, arch))]
    return not known or any(_runs(capability, *match.groups()) for match in known)


def _runs(capability: tuple[int, int], kind: str, major: str, minor: str, suffix: str) -> bool:
    made_for = (int(major), int(minor))
    if suffix == "a":
        return capability == made_for
    same_family = capability[0] == made_for[0] or (kind == "compute" and not suffix)
    return capability >= made_for and same_family


def problem(devices: Sequence[Device], arch_list: Sequence[str]) -> str:
    """Which GPU can't run this torch, or "" where all can."""
    for number, device in enumerate(devices):
        if not able(device.capability, arch_list):
            return (
                f"GPU {number} ({device.name}) has compute capability "
                f"{device.capability[0]}.{device.capability[1]}, and the torch here has code for "
                f"{', '.join(arch_list)} only: take an image whose torch knows this GPU"
            )
    return ""


def look() -> tuple[list[Device], list[str]]:
    """The visible GPUs and torch's list of architectures.

    A process of its own asks: the one that does holds GPU memory until it ends. Raises
    `RuntimeError` where CUDA can't be started.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        return pool.submit(_look).result()


def _look() -> tuple[list[Device], list[str]]:
    from torch import cuda

    devices = [
        Device(cuda.get_device_name(number), cuda.get_device_capability(number))
        for number in range(cuda.device_count())
    ]
    return devices, cuda.get_arch_list()
