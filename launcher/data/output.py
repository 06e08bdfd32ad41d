"""Writes a .bin and .idx piece by piece, in bounded memory; both appear only when complete."""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher import files
from launcher.data import indexed
from launcher.data.sequences import Columns
from launcher.errors import UsageError
from launcher.files import Aside

PIECE = 1 << 17
"""Numbers of a column that are in memory at a time."""
SUFFIXES = (".bin", ".idx", ".documents")
"""Of the files of a prefix; the last one's columns go into the index in the end."""


class Busy(UsageError):
    """Another job writes the same files."""


class Output:
    """One data file being written, aside.

    The columns of the index are kept on disk as well, so memory doesn't grow with the documents.
    Raises as `alone` does.
    """

    def __init__(self, prefix: Path, kind: np.dtype[np.generic]) -> None:
        self.prefix = prefix
        self.kind = kind
        self.sequences = self.documents = self.tokens = 0
        self._written = ExitStack()
        indexed.recover(prefix)
        self._bin, self._index, self._counts = alone(targets(prefix), self._written)
        self._index.file.write(bytes(indexed.HEADER))

    def add(self, columns: Columns) -> None:
        """Write documents after those that are there."""
        self._bin.file.write(columns.tokens)
        self._index.file.write(columns.lengths.tobytes())
        self._counts.file.write(columns.counts.tobytes())
        self.tokens += len(columns.tokens) // self.kind.itemsize
        self.sequences += len(columns.lengths)
        self.documents += len(columns.counts)

    def complete(self) -> None:
        """Finish the index and bring both files to the disk, where they stay aside."""
        index, counts = self._index.file, self._counts.file
        index.flush()
        self._write_running(index, indexed.HEADER, self.sequences, self.kind.itemsize)
        index.write(bytes(8))
        counts.flush()
        self._write_running(counts, 0, self.documents, 1, ends=True)
        code = {2: indexed.UINT16_CODE, 4: indexed.INT32_CODE}[self.kind.itemsize]
        header = struct.pack("<QBQQ", indexed.VERSION, code, self.sequences, self.documents + 1)
        index.seek(0)
        index.write(indexed.MAGIC + header)
        for aside in (self._bin, self._index):
            aside.complete()

    def _write_running(
        self, source: IO[bytes], at: int, count: int, unit: int, ends: bool = False
    ) -> None:
        """Append where each of `count` numbers begins, or ends, as int64, in steps of `unit`."""
        total = 0
        for numbers in _pieces(source, at, count):
            sums = np.cumsum(numbers, dtype=np.int64) * unit + total
            column = sums if ends else np.concatenate(([total], sums[:-1]))
            self._index.file.write(column.astype("<i8").tobytes())
            total = int(sums[-1])

    def close(self) -> None:
        """Remove what is unfinished; nothing after `publish`."""
        self._written.close()

    def publish(self) -> None:
        """Give both files their names, in place of older ones."""
        indexed.publish(self._bin, self._index)
        self.close()


def targets(prefix: Path) -> list[Path]:
    """The files that an Output writes."""
    return [prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES]


def alone(written: Sequence[Path], stack: ExitStack) -> list[Aside]:
    """New files for this job alone, that will be `written`; `stack` removes and closes them.

    Raises Busy where another job writes one, UsageError where a folder isn't there or a name is
    that of something else than a file, files.Refused where other users write in the folder.
    """
    for target in written:
        if not target.parent.is_dir():
            remedy = f"Make it: mkdir -p {target.parent}"
            raise UsageError(f"{target.parent}: no such folder", remedy)
        if target.exists() and not target.is_file():
            raise UsageError(f"{target}: it isn't a file", "Take another name for the output.")
    files.require_trusted(written[0].parent)
    token = secrets.token_hex(8)
    with files.folder_lock(written[0].parent), ExitStack() as opened:
        for target in written:
            if files.sweep(target):
                remedy = "Wait for it, or choose another name."
                raise Busy(f"{target}: another job writes it", remedy)
        found = [opened.enter_context(Aside(target, token=token)) for target in written]
        stack.push(opened.pop_all())
    return found


def wait(prefix: Path) -> None:
    """Return when no job writes PREFIX.bin any more, whether it was completed or not."""
    for path in files.asides(targets(prefix)[0]).values():
        with suppress(FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


class Unfinished(Protocol):
    """What a job writes."""

    def complete(self) -> None:
        """Bring all of it to the disk, aside."""

    def publish(self) -> None:
        """Give it its name."""


def publish(outputs: Sequence[Unfinished]) -> None:
    """Complete all, and only then name any."""
    for output in outputs:
        output.complete()
    for output in outputs:
        output.publish()


def _pieces(file: IO[bytes], at: int, count: int) -> Iterator[NDArray[np.int32]]:
    """Read int32 numbers by place, which leaves alone where the file is written."""
    while count:
        size = min(count, PIECE)
        yield np.frombuffer(os.pread(file.fileno(), 4 * size, at), "<i4")
        at, count = at + 4 * size, count - size
