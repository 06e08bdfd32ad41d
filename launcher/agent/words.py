"""Texts and file names by which the launcher recognises what the runner reports."""

from __future__ import annotations

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


def say(text: str, who: str = SAYS) -> None:
    """Say it on stderr, as the runner or as somebody else: "gpt: "."""
    print(f"{who}{text}", file=sys.stderr, flush=True)
