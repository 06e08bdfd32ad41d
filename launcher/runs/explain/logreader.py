"""Reads a log of any length in constant memory: the lines of trouble, and about the run.

Of lines that differ in numbers and addresses alone, as 64 ranks write them, only the first is
looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from launcher.runs.explain.loglines import LINES, Words, parse

LONGEST_LINE = 1 << 11  # bytes of a line; some expressions take the square of it
PIECE = 1 << 21  # bytes of a log that are looked at together
CONTEXT = 64  # lines kept from the piece before, for messages of several lines
MOST_SEEN = 1 << 16  # kinds of lines that are remembered; beyond that they are looked at again
DIGITS = b"0123456789abcdef"  # what lines may differ in and be the same: a rank, a time, an address
TROUBLE = re.compile("|".join(LINES["trouble"]).encode(), re.IGNORECASE)
HEAD = 1 << 20  # bytes in which a run says what it is
PATTERNS = {name: re.compile(says.encode()) for name, says in LINES["about"].items()}
ITERATION = re.compile(rb"\biteration[ :]+(\d+)(?:/ *\d+)?")
FAR = 1 << 16  # bytes at a piece's end in which its last iteration is looked for


class LogReader:
    """Reads a log once: the windows to look at, what it says about the run, and where it ends."""

    def __init__(self, log: Iterable[bytes]) -> None:
        self._log = log
        self.about: dict[str, str] = {}
        self.end = 0

    def windows(self) -> Iterator[tuple[list[Words], list[Words]]]:
        """The lines of trouble, of kinds not seen before, and those kept before them."""
        seen, before, first = set[int](), list[Words](), 1
        for piece in _pieces(self._log):
            kinds = piece.translate(None, DIGITS).split(b"\n")
            new = {kind for kind in set(kinds) if hash(kind) not in seen}
            seen = set() if len(seen) > MOST_SEEN else seen
            seen.update(map(hash, new))
            if new and (kept := _kept(piece, kinds, new, first)):
                yield before, kept
                before = kept[-CONTEXT:]
            self._look(piece, first)
            first += len(kinds)
            self.end = first - 1

    def _look(self, piece: bytes, first: int) -> None:
        """Note what the log's head says of the run, and the last iteration so far."""
        if first == 1:
            self.about = {
                name: match[1].decode(errors="replace").strip()
                for name, pattern in PATTERNS.items()
                if (match := pattern.search(piece, 0, HEAD))
            }
        for match in ITERATION.finditer(piece, max(0, len(piece) - FAR)):
            self.about["last iteration"] = match[1].decode()


def _pieces(log: Iterable[bytes]) -> Iterator[bytes]:
    """The log in pieces of whole lines; a line that is far too long is cut."""
    parts, size = list[bytes](), 0
    for data in log:
        parts.append(data)
        size += len(data)
        if size >= PIECE:
            whole, newline, left = b"".join(parts).rpartition(b"\n")
            yield whole if newline else left
            parts = [left] if newline else []
            size = len(left) if newline else 0
    if size:
        yield b"".join(parts).removesuffix(b"\n")


def _kept(piece: bytes, kinds: list[bytes], new: set[bytes], first: int) -> list[Words]:
    """The lines of trouble, of a kind not seen before, each with its neighbours."""
    lines = piece.split(b"\n")
    firsts = dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True))
    hits = [at for at in map(firsts.__getitem__, new) if TROUBLE.search(_cut(lines[at]))]
    near = sorted({at + by for at in hits for by in (-1, 0, 1)} - {-1, len(lines)})
    text = b"\n".join(_cut(lines[at]) for at in near).decode(errors="replace")
    return [parse(first + at, line) for at, line in zip(near, text.split("\n"), strict=False)]


def _cut(line: bytes) -> bytes:
    """A line without the middle of what is longer than LONGEST_LINE."""
    half = LONGEST_LINE // 2
    return line if len(line) <= LONGEST_LINE else line[:half] + line[-half:]
