"""Runs what compiles, in a build stage.

    compilers.py run VARIABLE ARGS    this Python with ARGS; VARIABLE tells a setup.py how many
                                      modules it may compile at a time, "" where it can't
    compilers.py nvcc ARGS            the base's nvcc, for the GPUs of CUDA_ARCHITECTURES alone

Stands beside stage.py in a build context; its failure is one line on stderr and exit code 1.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import deque

AT_ONCE = 4  # modules of an extension, where its setup.py can compile several

GPU_OPTIONS = ("-gencode", "--generate-code", "-arch", "--gpu-architecture")
"""By which nvcc is told what to compile for; each takes a value."""
OUT_OF_MEMORY = re.compile(
    "Killed|died due to signal 9|out of memory|Cannot allocate memory|bad_alloc"
)
"""What compilers say where the system ends them, or gives them no memory."""
FAULTS = (
    (
        r"detected CUDA version \(([\d.]+)\) mismatches[^(]*\(([\d.]+)\)",
        "nvcc is of CUDA {}, and torch was made for {}: take a base of that CUDA",
    ),
    (
        r"does not match the version used to compile Pytorch.*\s.*compiled with Cuda ([\d.]*\d)",
        "nvcc isn't of CUDA {}, which torch was made for: take a base of that CUDA",
    ),
    (
        r"name 'bare_metal_version' is not defined|CUDA_HOME environment variable is not set",
        "the base has no nvcc, or a torch without CUDA: take a base with both",
    ),
    (
        r"<urlopen error",
        "its setup.py downloads, and no build has a network: tell it to compile, by a variable "
        "in the extension's environment in matrix.yaml",
    ),
    (
        r"Unsupported gpu architecture '(\w+)'",
        "this nvcc compiles for no {}: name others in ARCHITECTURES or the row",
    ),
    (
        r"#error C\+\+(\d+) or later compatible compiler is required",
        "its setup.py asks for an older C++ than {}, which this torch's headers need: take a row "
        "with an older torch",
    ),
    (
        r"Could not find (CUDNN\w+)",
        "there are no cuDNN headers ({}): torch's are looked for at CUDNN_PATH",
    ),
    (
        r"(?s)[Cc]ould not find.{0,200}?(3rdparty/[\w-]+)",
        "{} isn't there, or not whole: name it under the extension's submodules in matrix.yaml",
    ),
    (
        r"fatal error: ((?:cudnn|nccl|cublas|cusparse|cusolver|nvrtc)\w*\.h): No such file",
        "the base has no {}: take its -devel image, or name the package that has it in the row",
    ),
    (
        r"fatal error: (\S+): No such file",
        "there is no {}: name the submodule or the package that has it in matrix.yaml",
    ),
    (
        OUT_OF_MEMORY.pattern,
        "there is too little memory for a single compiler: build where there is more",
    ),
)
"""What compiling an extension fails for, and what it means."""


def divided(jobs: int, at_once: str) -> dict[str, str]:
    """How `jobs` compilers are told to a setup.py: by MAX_JOBS, which is of each module.

    at_once: the variable for modules at a time. Without, each waits for the slowest of the last
    """
    modules = min(jobs, AT_ONCE) if at_once else 1
    return {"MAX_JOBS": str(jobs // modules)} | ({at_once: str(modules)} if at_once else {})


def run_compiler(args: list[str], at_once: str = "") -> None:
    """Run this Python with `args`, with half of the compilers each time one is killed for memory.

    MAX_JOBS is how many they are at first. What fails otherwise ends this process, in the words of
    FAULTS where it is among them.
    """
    jobs = int(os.environ.get("MAX_JOBS", "1"))
    while True:
        code, said = run_told(args, divided(jobs, at_once))
        if code == 0:
            return
        if not (OUT_OF_MEMORY.search(said) and jobs > 1):
            break
        jobs //= 2
        print(f"stage: too little memory: compiling again, {jobs} at a time", flush=True)
    for pattern, reason in FAULTS:
        if found := re.search(pattern, said):
            sys.exit(f"stage: {reason.format(*found.groups())}")
    sys.exit(f"stage: {args[0]} {args[1]} failed with exit code {code}")


def run_told(args: list[str], extra: dict[str, str]) -> tuple[int, str]:
    """Exit code and output, which is passed on as it comes."""
    command, last = [sys.executable, *args], deque[str](maxlen=5000)
    with subprocess.Popen(
        command,
        env={**os.environ, **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last.append(line)
    return process.returncode, "".join(last)


def for_gpus(args: list[str], gpus: list[str]) -> list[str]:
    """nvcc's arguments for these GPUs, in place of those that they name; the same for none.

    A setup.py may name a dozen GPUs whatever is asked for, of which nvcc may have no code for some.
    """
    kept, rest = [], iter(args)
    for one in rest:
        if one in GPU_OPTIONS:
            next(rest, "")
        elif one.partition("=")[0] not in GPU_OPTIONS:
            kept.append(one)
    if len(kept) == len(args):
        return kept
    return [*kept, *(f"-gencode=arch=compute_{one},code=sm_{one}" for one in gpus)]


def nvcc() -> str:
    """The base's nvcc, found as torch finds it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


if __name__ == "__main__":
    if sys.argv[1] == "nvcc":
        asked = os.environ["CUDA_ARCHITECTURES"].split()
        os.execv(found := nvcc(), [found, *for_gpus(sys.argv[2:], asked)])  # noqa: S606  # it becomes nvcc
    run_compiler(sys.argv[3:], sys.argv[2])
