"""Whether the image's torch has code for the GPUs that are visible."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

ARCH = r"(sm|compute)_(\d+)(\d)([af]?)"
Device = tuple[str, tuple[int, int]]
"""A GPU: its name and its compute capability, major and minor."""


def able(capability: tuple[int, int], arch_list: Sequence[str]) -> bool:
    """Whether a GPU can run code made for `arch_list`, as torch.cuda.get_arch_list() gives it.

    sm_86 runs on the same major capability from that minor on; compute_86 is compiled on any
    GPU from 8.6 on; a trailing a holds for exactly this capability. A list with neither, of
    another maker's GPUs or of a torch for the CPU, says nothing, and is no reason to refuse.
    https://docs.nvidia.com/cuda/cuda-compiler-driver-nvcc/#gpu-compilation
    """
    known = [match.groups() for arch in arch_list if (match := re.fullmatch(ARCH, arch))]
    for kind, major, minor, suffix in known:
        made_for = (int(major), int(minor))
        any_later = capability[0] == made_for[0] or (kind == "compute" and not suffix)
        if capability == made_for or (suffix != "a" and any_later and capability > made_for):
            return True
    return not known


def problem(devices: Sequence[Device], arch_list: Sequence[str]) -> str:
    """Which GPU can't run this torch, or "" where all can."""
    for number, (name, capability) in enumerate(devices):
        if not able(capability, arch_list):
            return (
                f"GPU {number} ({name}) has compute capability {capability[0]}.{capability[1]}, "
                f"and the torch here has code for {', '.join(arch_list)} only: take an image whose "
                "torch knows this GPU"
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

    numbers = range(cuda.device_count())
    devices = [(cuda.get_device_name(n), cuda.get_device_capability(n)) for n in numbers]
    return devices, cuda.get_arch_list()
