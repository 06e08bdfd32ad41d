"""Checks whether the image's torch has code for the visible GPUs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

from launcher.agent import start
from launcher.agent.ranks import rank

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
    """The visible GPUs, none where there is no driver, and torch's list of architectures.

    A process of its own asks torch, and ends with this thread. What it asks makes no CUDA context
    (pytorch/pytorch#99533): ranks beside it start on GPUs of compute mode exclusive, too. Raises
    `RuntimeError` where CUDA can't be started.
    """
    command = [sys.executable, "-I", "-S", rank.__file__, str(os.getpid())]
    command += [sys.executable, start.__file__, "ranks.devices"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        told = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        raise RuntimeError(f"asking torch ended with exit code {done.returncode}") from None
    if "error" in told:
        raise RuntimeError(told["error"])
    return [(name, tuple(capability)) for name, capability in told["devices"]], told["arch_list"]


def main() -> None:
    """Print what `look` gives, as JSON; also where a stop comes to all processes of a run."""
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, signal.SIG_IGN)
    from torch import cuda

    try:
        numbers = range(cuda.device_count())
        found = [(cuda.get_device_name(n), cuda.get_device_capability(n)) for n in numbers]
        told: object = {"devices": found, "arch_list": cuda.get_arch_list() if found else []}
    except RuntimeError as error:
        told = {"error": str(error)}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
