"""Explains a SIGBUS: a file that the rank had mapped became shorter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

ENDINGS = (".bin", ".idx")
"""Of Megatron's data, which is named without them."""


def sizes(program: Iterable[str]) -> dict[Path, int]:
    """The sizes (bytes) of the data files that a program's arguments name."""
    found = {}
    for word in program:
        for path in (Path(f"{word}{ending}") for ending in ENDINGS):
            with suppress(OSError, ValueError):
                found[path] = path.stat().st_size
    return found


def blame(before: Mapping[Path, int]) -> str:
    """Which file is shorter than it was, in words; "" where none is."""
    for path, size in before.items():
        try:
            now = path.stat().st_size
        except OSError:
            return f"{path}, which it read, is there no more"
        if now < size:
            return f"{path}, which it read, became shorter: {now} of {size} bytes"
    return ""
