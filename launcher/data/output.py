"""Writes a .bin and .idx piece by piece, in bounded memory; both appear only when complete."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Protocol

import numpy as np
from numpy.typing import NDArray

from launcher.data import indexed
from launcher.data.sequences import Columns
from launcher.errors import UsageError

PIECE = 1 << 17
"""Numbers of a column that are in memory at a time."""
PARTIAL = ".partial"
"""How the names of files end that aren't complete."""
SUFFIXES = (".bin", ".idx", ".documents")
"""Of the files of a prefix; the last one's columns go into the index in the end."""
UNLOCKABLE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What a file system answers that has no locks: jobs there can't tell that another one writes."""


class Busy(UsageError):
    """Another job writes the same files."""


class Output:
    """One data file being written, under names that end in `.partial`.

    The columns of the index are kept on disk as well, so memory doesn't grow with the documents.
    Raises as `locked` does.
    """

    def __init__(self, prefix: Path, kind: np.dtype[np.generic]) -> None:
        self.prefix = prefix
        self.kind = kind
        self.sequences = self.documents = self.tokens = 0
        self._files = ExitStack()
        try:
            self._bin, self._index, self._counts = (
                locked(path, self._files) for path in targets(prefix)
            )
        except BaseException:
            self._files.close()
            raise
        self._index.write(bytes(indexed.HEADER))

    def add(self, columns: Columns) -> None:
        """Write documents after those that are there."""
        self._bin.write(columns.tokens)
        self._index.write(columns.lengths.tobytes())
        self._counts.write(columns.counts.tobytes())
        self.tokens += len(columns.tokens) // self.kind.itemsize
        self.sequences += len(columns.lengths)
        self.documents += len(columns.counts)

    def complete(self) -> None:
        """Finish the index and bring both files to the disk; they keep their partial names."""
        self._index.flush()
        self._write_running(self._index, indexed.HEADER, self.sequences, self.kind.itemsize)
        self._index.write(bytes(8))
        self._counts.flush()
        self._write_running(self._counts, 0, self.documents, 1, ends=True)
        code = {2: indexed.UINT16_CODE, 4: indexed.INT32_CODE}[self.kind.itemsize]
        self._index.flush()
        header = struct.pack("<QBQQ", indexed.VERSION, code, self.sequences, self.documents + 1)
        # The file is open for appending, so that opening it emptied no other job's.
        with partial(targets(self.prefix)[1]).open("r+b") as index:
            index.write(indexed.MAGIC + header)
        for file in (self._bin, self._index):
            file.flush()
            os.fsync(file.fileno())

    def _write_running(
        self, source: IO[bytes], at: int, count: int, unit: int, ends: bool = False
    ) -> None:
        """Append where each of `count` numbers begins, or ends, as int64, in steps of `unit`."""
        total = 0
        for numbers in _pieces(source, at, count):
            sums = np.cumsum(numbers, dtype=np.int64) * unit + total
            column = sums if ends else np.concatenate(([total], sums[:-1]))
            self._index.write(column.astype("<i8").tobytes())
            total = int(sums[-1])

    def close(self) -> None:
        """Remove what is unfinished; nothing after `publish`."""
        self._files.close()

    def publish(self) -> None:
        """Give both files their names; the index last, as what says that the data is there."""
        tokens, index, counts = targets(self.prefix)
        index.unlink(missing_ok=True)
        for target in (tokens, index):
            partial(target).replace(target)
        partial(counts).unlink()
        self._files.pop_all()  # the names may be another job's from now on
        for file in (self._bin, self._index, self._counts):
            file.close()
        folder = os.open(self.prefix.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def targets(prefix: Path) -> list[Path]:
    """The files that an Output writes."""
    return [prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES]


def partial(target: Path) -> Path:
    """What a file is called until it is complete."""
    return target.with_name(target.name + PARTIAL)


def locked(target: Path, files: ExitStack) -> IO[bytes]:
    """The file that will be `target`, opened for appending, empty, for this job alone.

    `files` removes and closes it. Raises Busy where another job writes it, UsageError where its
    folder isn't there or the name is that of something else than a file.
    """
    path = partial(target)
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent}: no such folder", f"Make it: mkdir -p {path.parent}")
    if target.exists() and not target.is_file():
        raise UsageError(f"{target}: it isn't a file", "Take another name for the output.")
    with ExitStack() as opened:
        file = opened.enter_context(path.open("ab+"))
        if not _lock(file, path):
            raise Busy(f"{path}: another job writes it", "Wait for it, or choose another name.")
        opened.callback(path.unlink, missing_ok=True)
        file.truncate(0)
        files.push(opened.pop_all())
    return file


def _lock(file: IO[bytes], path: Path) -> bool:
    """Take the file for this process; False where another has it, or has just finished it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNLOCKABLE:
            raise OSError(error.errno, error.strerror, str(path)) from None
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def wait(prefix: Path) -> None:
    """Return when no job writes PREFIX.bin any more, whether it was completed or not."""
    try:
        with partial(targets(prefix)[0]).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
    except FileNotFoundError:
        return


class Unfinished(Protocol):
    """What a job writes."""

    def complete(self) -> None:
        """Bring all of it to the disk, under its partial name."""

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
