"""Trains as `python3 -m launcher.trainer.gpt`, and reports what was allocated at the peak.

`python3 -m bench.gpu.held OPTIONS` is a rank's program in place of the trainer's, such as a job
of bench.gpu.schedule with `program` starts. At the end each rank 0 prints the most that torch's
allocator had allocated, by where in Python it was allocated and by size, the largest first.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

SHOWN, DEEP, PARTS = 60, 6, 40
"""Groups that are printed, innermost frames of each, and parts of the time."""

LEFT_OUT = tuple(f"torch/{part}" for part in "_dynamo _functorch nn/modules _inductor _ops".split())
"""Parts of paths of frames that say nothing."""


def allocated(events: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes after each event."""
    held = dict[int, Mapping[str, Any]]()
    return [*accumulate(_change(event, held) for event in events)]


def at_peak(events: Sequence[Mapping[str, Any]]) -> tuple[int, list[Mapping[str, Any]]]:
    """The most bytes that were allocated at once, and what they were."""
    after, held = allocated(events), dict[int, Mapping[str, Any]]()
    most = max(after, default=0)
    for event in events[: after.index(most) + 1]:
        _change(event, held)
    return most, [*held.values()]


def _change(event: Mapping[str, Any], held: dict[int, Mapping[str, Any]]) -> int:
    """Bytes more that are allocated after an event, of those that are `held` by addresses."""
    if event["action"] == "alloc":
        held[event["addr"]] = event
        return int(event["size"])
    if event["action"] == "free_requested" and held.pop(event["addr"], None):
        return -int(event["size"])
    return 0


GENERATED = re.compile(r"/\w\w/c\w{40,}\.py$")
"""Files of torch's compiler, whose lines differ from layer to layer."""


def place(event: Mapping[str, Any]) -> str:
    """Where it was allocated: the innermost frames of Python that say something."""
    frames = [
        f"{'/'.join(frame['filename'].split('/')[-2:])}:{frame['line']} {frame['name']}"
        for frame in event.get("frames", ())
        if not (
            GENERATED.search(frame["filename"]) or any(x in frame["filename"] for x in LEFT_OUT)
        )
    ]
    return " < ".join(frames[:DEEP]) or "no frames"


def lines(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The report: the most in each of PARTS of the events, and what there was at the peak."""
    most, held = at_peak(events)
    after, each = allocated(events), max(1, len(events) // PARTS)
    peaks = [f"{max(after[at : at + each]) / 2**30:.2f}" for at in range(0, len(after), each)]
    sums, counts = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for event in held:
        key = place(event), event["size"]
        sums[key] += event["size"]
        counts[key] += 1
    told = [f"held: {most / 2**30:.3f} GiB in {len(held)} blocks; GiB by time: {' '.join(peaks)}"]
    for (where, size), whole in sums.most_common(SHOWN):
        told.append(f"held: {whole / 2**20:9.1f} MiB = {counts[where, size]} x {size}: {where}")
    shown = sum(whole for _, whole in sums.most_common(SHOWN))
    return [*told, f"held: {(most - shown) / 2**20:9.1f} MiB in smaller groups"]


def main(argv: Sequence[str]) -> int:
    """The exit code of training."""
    import torch

    from launcher.trainer.gpt import __main__ as trainer

    rank = int(os.environ.get("RANK", 0))
    device = int(os.environ.get("LOCAL_RANK", 0))
    if rank == 0:
        torch.cuda.set_device(device)
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python")
    code = trainer.main(argv)
    if rank == 0:
        events = torch.cuda.memory._snapshot()["device_traces"][device]
        print("\n".join(lines(events)), flush=True)
    return code


if __name__ == "__main__":
    from launcher.agent.ranks import exit_codes

    exit_codes.leave(main(sys.argv[1:]))
