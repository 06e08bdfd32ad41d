"""A rank's memory: upstream's line after the first interval, samples into a file, the peak."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

from launcher.train.gpt.arguments import UsageError

MEGABYTE = 1024 * 1024
STATM = Path("/proc/self/statm")  # proc(5): total and resident pages, …


def line(rank: int, iteration: int, current: dict[str, int], peak: dict[str, int]) -> str:
    """Upstream's line of a GPU's memory; bytes in, of `allocated` and `reserved`."""
    fields = [
        f"{prefix}{kind}: {memory[kind] / MEGABYTE:.2f}"
        for kind in ("allocated", "reserved")
        for prefix, memory in (("", current), ("max ", peak))
    ]
    return f"[Rank {rank}] (after {iteration} iterations) memory (MB) | " + " | ".join(fields)


def current(on_cpu: bool) -> dict[str, int]:
    """Bytes now: of this rank's GPU `allocated` and `reserved`, of a process `resident`."""
    if on_cpu:
        pages = int(STATM.read_text().split()[1])
        return {"resident": pages * resource.getpagesize()}
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def peak(on_cpu: bool) -> dict[str, int]:
    """The most there has been so far, in bytes, by the same names."""
    if on_cpu:  # getrusage(2): in kilobytes
        return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


@contextlib.contextmanager
def sampled(arguments: argparse.Namespace) -> Iterator[None]:
    """Sample this rank's memory meanwhile, where `arguments` ask for that.

    Each line of `rank-N.jsonl` is one sample: `time` in seconds since 1970, and bytes. Raises
    `UsageError` where the file can't be written.
    """
    if not arguments.memory_samples:
        yield
        return
    folder = Path(arguments.memory_samples)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"rank-{os.environ['RANK']}.jsonl").open("w", buffering=1)
    except OSError as error:
        raise UsageError(f"can't write to {folder}: {error.strerror}") from error
    over = threading.Event()
    device = torch.cuda.current_device()
    work = (file, over, arguments.memory_interval, arguments.on_cpu, device)
    thread = threading.Thread(target=_sample, args=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _sample(
    file: IO[str], over: threading.Event, interval: float, on_cpu: bool, device: int
) -> None:
    torch.cuda.set_device(device)  # each thread has a device of its own
    try:
        with file:
            last = False
            while not last:
                last = over.wait(interval) if file.tell() else False
                sample = {"time": round(time.time(), 3), **current(on_cpu)}
                file.write(json.dumps(sample) + "\n")
    except OSError as error:  # the training is worth more than this
        print(f"memory is no longer sampled: {error.strerror}", flush=True)
