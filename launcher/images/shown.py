"""Bytes and how many of them are done, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launcher.errors import UsageError
from launcher.progress import Progress

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def bytes_of(text: str) -> int:
    """The bytes of 500M or 1G. Raises UsageError for anything else."""
    found = re.fullmatch(r"([1-9]\d{0,9})([KMGkmg]?)", text, re.ASCII)
    if not found:
        raise UsageError(f"{text!r} isn't a size", "Such as 500M or 1G.")
    return int(found[1]) * UNITS[found[2].upper()]


def size(count: int) -> str:
    """12.3 MB of a number of bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


@contextmanager
def counted(progress: Progress, what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A step of `total` bytes; what it yields is told how many more are done."""
    text = f"{what}, {size(total)}"
    done, shown = 0, -1

    def seen(count: int) -> None:
        nonlocal done, shown
        done += count
        percent = 100 * done // max(total, 1)
        if percent != shown:
            shown = percent
            progress.show(f"{text} · {percent}%")

    progress.step(text)
    yield seen
    progress.close()
