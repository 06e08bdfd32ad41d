"""Says what is being done: one live line on a terminal, one line per step where piped."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from launcher.screen import bare, printable, size

KEPT = 30


class Progress:
    """A step at a time; output within a step is kept, and shown only where the step fails."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = bare(stream or sys.stderr)
        self.live = self.stream.isatty()
        self.tail: deque[str] = deque(maxlen=KEPT)
        self._started = time.monotonic()
        self._text = ""

    def step(self, text: str) -> None:
        """Begin a step; what the last one printed is forgotten."""
        self.close()
        self._text, self._started = text, time.monotonic()
        self.tail.clear()
        self.show(text)

    def cached(self) -> None:
        """The step was taken from a cache: say so in its line."""
        if self._text and not self._text.endswith("cached"):
            self._text += " · cached"

    def output(self, line: str) -> None:
        """A line that the step printed: kept, and shown beside the step on a terminal."""
        if line.strip():
            self.tail.append(line.rstrip())
            self.show(f"{self._text} · {line.strip()}")

    def show(self, text: str) -> None:
        """A line that is gone with the next; nothing where piped."""
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write("\r\x1b[K" + printable(text)[:width])
            self.stream.flush()

    @contextmanager
    def counted(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A step of `total` bytes; what it yields is told how many more are done."""
        text = f"{what}, {size(total)}"
        done, shown = 0, -1

        def seen(count: int) -> None:
            nonlocal done, shown
            done += count
            percent = 100 * done // max(total, 1)
            if percent != shown:
                shown = percent
                self.show(f"{text} · {percent}%")

        self.step(text)
        yield seen
        self.close()

    def note(self, text: str) -> None:
        """A line, or several, that stay."""
        text = printable(text, kept="\n\t")
        self.stream.write(f"\r\x1b[K{text}\n" if self.live else f"{text}\n")
        self.stream.flush()

    def close(self) -> None:
        """End the step with its duration in seconds."""
        if self._text:
            self.note(f"{self._text} ({time.monotonic() - self._started:.1f} s)")
            self._text = ""

    def fail(self) -> list[str]:
        """End the step without success; returns its last lines."""
        if self._text:
            self.note(f"{self._text}: failed")
            self._text = ""
        return list(self.tail)
