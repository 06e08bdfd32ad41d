"""What reaches the terminal: nothing in a text from elsewhere is taken by it for a command.

Names, labels, logs' and registries' words are somebody else's. The command line prints through
`guarded`, where no command of ours need think of that. A training program's own output doesn't go
this way: it is passed on as bytes, untouched.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast


def printable(text: str, kept: str = "") -> str:
    """`text` in which what isn't seen as itself is written out as `repr` does, but for `kept`.

    That is control characters, what turns the direction of writing, and halves of characters.
    """
    return "".join(c if c.isprintable() or c in kept else repr(c)[1:-1] for c in text)


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
