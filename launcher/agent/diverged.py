"""Notes from which iteration on a run's numbers are NaN: the last rank's node alone has them."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from pathlib import Path

FILE = "diverged"
STEP = re.compile(r"\biteration +(\d{1,18})/ *\d+ \|(.*)", re.DOTALL)
NUMBER = re.compile(
    r"\| *([a-z][\w ./-]*): +([-+]?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf|nan)) ", re.IGNORECASE
)


def note(environ: Mapping[str, str], folder: str) -> None:
    """Have what the last rank prints noted in the folder, where there are several nodes."""
    rank, ranks = (int(environ.get(name, 0)) for name in ("RANK", "WORLD_SIZE"))
    if rank != ranks - 1 or environ.get("LOCAL_WORLD_SIZE") == str(ranks):
        return
    write, file, first = sys.stdout.write, Path(folder, FILE), 0

    def noting(text: str) -> int:
        nonlocal first
        if found := STEP.search(text):
            before, first = first, (first or int(found[1])) if _is_nan(f"|{found[2]}") else 0
            if first != before:
                with suppress(OSError):
                    file.write_text(str(first), encoding="ascii")
        return write(text)

    sys.stdout.write = noting  # type: ignore[method-assign]


def noted(folder: str) -> int:
    """The iteration from which on they were NaN to the end, 0 where they weren't."""
    with suppress(OSError, ValueError):
        return int(Path(folder, FILE).read_text(encoding="ascii"))
    return 0


def _is_nan(line: str) -> bool:
    """Whether a step's line says that the weights are no numbers, as the launcher's guard does."""
    values = {name.strip(): float(value) for name, value in NUMBER.findall(line)}
    losses = [value for name, value in values.items() if name.endswith("loss")]
    some = values.get("number of nan iterations", 0) > 0
    norm = values.get("grad norm", 0.0)
    if norm:
        skipped = values.get("number of skipped iterations", 0) > 0
        return not isfinite(norm) and (some or not skipped or not all(map(isfinite, losses)))
    return (some and not losses) or not all(map(isfinite, losses))
