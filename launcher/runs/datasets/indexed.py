"""Megatron's indexed dataset, written and read: tokens in PREFIX.bin, their places in PREFIX.idx.

The format is that of megatron/core/datasets/indexed_dataset.py, little-endian throughout:
`MMIDIDX\\0\\0`, u64 version, u8 type code, u64 sequences, u64 documents + 1, then i32 sequence
lengths in tokens, i64 sequence offsets in bytes, and i64 indices at which a document begins.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from launcher.base import files
from launcher.runs.datasets import output

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_CODE = 8
INT32_CODE = 4
UINT16_VOCABULARY = 65500  # megatron's limit for two-byte tokens
WIDTHS = {1: 1, 2: 1, 3: 2, INT32_CODE: 4, 5: 8, UINT16_CODE: 2}
"""Bytes of a token by its type code; 6 and 7 are floating point, which no token is."""

KINDS = {1: "B", 2: "b", 3: "h", INT32_CODE: "i", 5: "q", UINT16_CODE: "H"}
"""As `array` calls them, on machines that are little-endian."""

READY = ".ready"
"""How the name of a complete index ends until its .bin has its name."""
SUFFIXES = (".bin", ".idx", ".made.json", ".documents")
"""Of the files of a prefix; the last one's column goes into the index in the end."""

HEADER = len(MAGIC) + struct.calcsize("<QBQQ")
PIECE = 1 << 17
"""Numbers of a column that are in memory at a time."""


class IndexedOutput:
    """One data file being written piece by piece, aside; both files appear only when complete.

    `width` is a token's bytes, 2 or 4. The columns of the index are kept on disk as well, so
    memory doesn't grow with the documents. `made` is how they were made, if that is known, for
    PREFIX.made.json. Raises as `output.alone` does.
    """

    made: Mapping[str, Any] | None = None

    def __init__(self, prefix: Path, width: int) -> None:
        self.prefix = prefix
        self.width = width
        self.sequences = self.documents = self.tokens = 0
        self._written = ExitStack()
        recover(prefix)
        asides = output.alone(targets(prefix), self._written)
        self._bin, self._index, self._made, self._counts = asides
        self._index.file.write(bytes(HEADER))

    def add(self, tokens: bytes, lengths: Any, counts: Any) -> None:
        """Write documents after those that are there.

        lengths: int32, tokens of each sequence; counts: int32, sequences of each document
        """
        for aside, what in ((self._bin, tokens), (self._index, lengths), (self._counts, counts)):
            if len(what):
                aside.file.write(what)
        self.tokens += len(tokens) // self.width
        self.sequences += len(lengths)
        self.documents += len(counts)

    def complete(self) -> None:
        """Finish the index and bring both files to the disk, where they stay aside."""
        index, documents = self._index.file, self._counts.file
        index.flush()
        self._write_begins(index, HEADER, self.sequences, self.width)
        documents.flush()
        end = self._write_begins(documents, 0, self.documents, 1)
        index.write(struct.pack("<q", end))
        code = {2: UINT16_CODE, 4: INT32_CODE}[self.width]
        index.seek(0)
        index.write(MAGIC + struct.pack("<QBQQ", VERSION, code, self.sequences, self.documents + 1))
        if self.made:
            counts = {"documents": self.documents, "tokens": self.tokens}
            self._made.file.write(json.dumps({**self.made, **counts}, indent=1).encode() + b"\n")
            self._made.complete()
        for aside in (self._bin, self._index):
            aside.complete()

    def _write_begins(self, source: IO[bytes], at: int, count: int, unit: int) -> int:
        """Append where each of `count` numbers begins, as int64, in steps of `unit`; the end."""
        total = 0
        for begun in range(0, count, PIECE):  # by place, which leaves alone where it is written
            size = 4 * min(count - begun, PIECE)
            numbers = array("i", os.pread(source.fileno(), size, at + 4 * begun))
            ends = array("q", accumulate((number * unit for number in numbers), initial=total))
            total = ends.pop()
            self._index.file.write(ends)
        return total

    def close(self) -> None:
        """Remove what is unfinished; nothing after `publish`."""
        self._written.close()

    def publish(self) -> None:
        """Give both complete files their names, in place of older ones.

        From the index's first new name on the pair is sure to get there: `recover` goes on with
        it where this is killed, or a disk fails.
        """
        index = self._index
        with files.folder_lock(self.prefix.parent):
            try:
                files.rename(index.path, files.aside_path(index.target, index.token, READY))
                _name_pair(self.prefix, index.token)
            finally:
                if not index.path.exists():  # it has its new name: `close` removes neither
                    self._bin.file.close()
                    index.file.close()
        if self.made:
            self._made.publish()
        self.close()


def token_width(vocab_size: int) -> int:
    """Bytes that a token is written in; Megatron's DType.optimal_dtype."""
    return 2 if vocab_size < UINT16_VOCABULARY else 4


def write(prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> int:
    """Write documents, each one sequence of token ids, and return how many tokens that is."""
    width = token_width(vocab_size)
    one = array("i", [1])
    with closing(IndexedOutput(prefix, width)) as made:
        for document in documents:
            tokens = array("H" if width == 2 else "i", document)
            made.add(tokens.tobytes(), array("i", [len(tokens)]), one)
        output.publish([made])
    return made.tokens


def targets(prefix: Path) -> list[Path]:
    """The files that an Output writes."""
    return [prefix.with_name(prefix.name + suffix) for suffix in SUFFIXES]


def recover(prefix: Path) -> None:
    """Name a pair that was complete when the process that wrote it was killed, where we may."""
    index = targets(prefix)[1]
    with suppress(OSError):
        if files.asides(index, READY):
            with files.folder_lock(prefix.parent):
                for token in files.asides(index, READY):
                    _name_pair(prefix, token)


def _name_pair(prefix: Path, token: str) -> None:
    """Name a complete pair; the old index goes before its .bin does, and the new one comes last."""
    data, index = targets(prefix)[:2]
    new = files.aside_path(data, token)
    if new.exists():
        index.unlink(missing_ok=True)
        os.replace(new, data)
        files.sync(prefix.parent)
    os.replace(files.aside_path(index, token, READY), index)
    files.sync(prefix.parent)


@dataclass(frozen=True)
class DatasetIndex:
    """What an .idx says of its .bin; `modes` where it has a byte more for each sequence."""

    sequences: int
    documents: int
    tokens: int
    code: int
    modes: bool = False


class DamagedDataset(ValueError):
    """A .bin and .idx that don't fit each other; the text says which file, and what is wrong."""


def read_filled_index(prefix: Path) -> DatasetIndex:
    """As `read_index`; raises DamagedDataset where there are no tokens, too."""
    index = read_index(prefix)
    if not index.tokens:
        raise DamagedDataset(f"{prefix}.bin: has no tokens")
    return index


def read_index(prefix: Path) -> DatasetIndex:
    """Read the index's header and its ends; the .bin is never read, only measured.

    Raises DamagedDataset where the two can't be what Megatron wrote, OSError where one can't be
    read.
    """
    recover(prefix)
    name, size = f"{prefix}.idx", os.path.getsize(f"{prefix}.bin")
    with open(name, "rb") as file:
        held = os.fstat(file.fileno()).st_size
        header = file.read(HEADER)
        if len(header) < HEADER:
            raise DamagedDataset(f"{name}: {held} bytes, and its header alone has {HEADER}")
        if not header.startswith(MAGIC):
            said = f"it doesn't begin with {MAGIC[:7].decode()}"
            raise DamagedDataset(f"{name}: no index of Megatron's: {said}")
        version, code, sequences, starts = struct.unpack("<QBQQ", header[len(MAGIC) :])
        if version != VERSION:
            raise DamagedDataset(f"{name}: version {version}, and Megatron reads {VERSION}")
        if code not in WIDTHS:
            raise DamagedDataset(f"{name}: type code {code}, which isn't one of tokens")
        wanted = HEADER + 12 * sequences + 8 * starts
        modes = sequences > 0 and held == wanted + sequences  # as multimodal indices have them
        if not starts or (held != wanted and not modes):
            raise DamagedDataset(
                f"{name}: {held} bytes, and its {sequences} sequences need {wanted}"
            )
        end = 0
        if sequences:
            length = _number(file, "<i", HEADER + 4 * (sequences - 1))
            offset = _number(file, "<q", HEADER + 4 * sequences + 8 * (sequences - 1))
            end = offset + length * WIDTHS[code]
        last = _number(file, "<q", HEADER + 12 * sequences + 8 * (starts - 1))
    if last != sequences:
        raise DamagedDataset(f"{name}: its documents end at {last} of {sequences} sequences")
    if end != size:
        raise DamagedDataset(f"{prefix}.bin: {size} bytes, and its index ends at {end}")
    return DatasetIndex(sequences, starts - 1, size // WIDTHS[code], code, modes)


def how_made(prefix: Path, documents: int, tokens: int) -> dict[str, Any] | None:
    """What PREFIX.made.json says; None where there is none, or it is of other files."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        with open(f"{prefix}.made.json", "rb") as file:
            said: dict[str, Any] = json.loads(file.read(1 << 24))
        if (said["documents"], said["tokens"]) == (documents, tokens):
            return said
    return None


def greatest(prefix: Path, index: DatasetIndex) -> int:
    """The greatest of the first 131,072 tokens. Raises OSError."""
    with open(f"{prefix}.bin", "rb") as file:
        return max(array(KINDS[index.code], file.read(PIECE * WIDTHS[index.code])), default=0)


def _number(file: IO[bytes], kind: str, at: int) -> int:
    file.seek(at)
    (found,) = struct.unpack(kind, file.read(struct.calcsize(kind)))
    return int(found)
