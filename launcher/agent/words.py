"""Texts and file names by which the launcher recognises what the runner reports."""

from __future__ import annotations

import re
import sys

SAYS = "runner: "
"""Begins each line of the runner's own."""

STOPPED = f"{SAYS}stopped: "
"""Starts the last line on stderr where the runner was asked to stop and every rank ended with 0."""

REPORTS = "stalled-"
"""Begins the name of a report's folder, which ends in its number."""

DIVERGED = "the loss or gradient was NaN from iteration {} to the end"
"""Reported by nodes and by the launcher where a run's numbers were NaN."""

CONCLUSION = "in short: "
"""Begins the line of a report that says whom the others wait for."""

REPORT = "report.txt"

COSTS = "rank-{}.costs.json"
"""The name of a file beside a rank's trace: what the trace's time went to."""

ASK = "LAUNCHER_ASK"
"""The variable by which a plan has the runner ask Megatron, where nobody could before the start."""

NEEDS = "LAUNCHER_NEEDS"
"""The variable with what the run imports: JSON, modules with what to say where one isn't there."""

IMAGE = "LAUNCHER_IMAGE"
"""The variable with the image's layers, as the engine says them."""

REFUSES = "this Megatron doesn't take these options"
"""Begins what the runner says of upstream's program that it has asked."""

COMPILING, COMPILED, FAST = "compiling the step", "compiled the step", "fast: "
"""What our program says of its first step, and what it has of the fast path from then on."""


def compiling(data: bytes, before: bool) -> bool:
    """Whether it compiles after writing `data`, where it did or didn't `before`."""
    begun, *ended = (data.rfind(word.encode()) for word in (COMPILING, COMPILED, FAST))
    return begun > max(ended) or (before and max(ended) < 0)


LINK = re.compile(
    r"all-reduce of (\d{1,6}) × (\d{1,6}) ranks, (.{1,80}): (\d{1,9}\.\d+) GB/s of bus bandwidth"
)
"""The rate of an all-reduce before the start: nodes, ranks of each, the GPU's name, GB/s."""


def link(nodes: int, each: int, gpu: str, rate: float) -> str:
    """The text that LINK reads."""
    return f"all-reduce of {nodes} × {each} ranks, {gpu}: {rate:.3f} GB/s of bus bandwidth"


def say(text: str, who: str = SAYS) -> None:
    """Say it on stderr, as the runner or as somebody else: "gpt: "."""
    print(f"{who}{text}", file=sys.stderr, flush=True)
