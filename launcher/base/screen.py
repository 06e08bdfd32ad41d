"""Terminal output: progress lines, sizes and durations, and text without control characters.

Names, labels, logs' and registries' words are somebody else's. The command line prints through
`guarded`, where no command of ours need think of that. A training program's own output doesn't go
this way: it is passed on as bytes, untouched.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

KEPT = 30
"""Lines of a step that are shown where it fails."""

ERASE = "\r\x1b[K"
"""Takes away what stands in the terminal's line."""


def printable(text: str, kept: str = "") -> str:
    """`text` in which what isn't seen as itself is written out as `repr` does, but for `kept`.

    That is control characters, what turns the direction of writing, and halves of characters.
    """
    if text.isprintable():
        return text
    return UNSEEN.sub(lambda found: "".join(_seen(c, kept) for c in found[0]), text)


UNSEEN = re.compile(r"[^ -~]+")


def _seen(character: str, kept: str) -> str:
    return character if character.isprintable() or character in kept else repr(character)[1:-1]


class Screen:
    """A stream of printable lines; all but what is written to it is the stream's below."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write it printable; only lines and tabs are kept."""
        self.stream.write(printable(text, kept="\n\t"))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def guarded() -> Iterator[None]:
    """Let what is printed within be printable, whatever it is, and whatever the encoding is."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_guard, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def _guard(stream: TextIO | None) -> TextIO:
    """None is a stream that was closed by who started us."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return cast(TextIO, stream and Screen(stream))


def bare(stream: TextIO) -> TextIO:
    """The stream below, for a line that is drawn again and again; its words are made printable."""
    return stream.stream if isinstance(stream, Screen) else stream


def size(count: int) -> str:
    """12.3 MB of a number of bytes."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """A time to wait, in its two largest units: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    if not seconds < 1e9:
        return "?"
    if seconds < 90:
        return f"{max(seconds, 0):.0f} s"
    minutes = round(seconds / 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min"


class Progress:
    """What is being done: one live line on a terminal, a line for each step where piped.

    Output within a step is kept, and shown only where the step fails.
    """

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
            import shutil

            width = shutil.get_terminal_size().columns - 1
            self.stream.write(ERASE + printable(text)[:width])
            self.stream.flush()

    @contextmanager
    def counted(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """A step of `total` bytes; it yields a function to call with each number of bytes done."""
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
        self.stream.write(f"{ERASE}{text}\n" if self.live else f"{text}\n")
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
