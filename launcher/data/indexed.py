"""Writes and checks Megatron's indexed dataset: tokens in PREFIX.bin, their places in PREFIX.idx.

The format is that of megatron/core/datasets/indexed_dataset.py, little-endian throughout:
`MMIDIDX\\0\\0`, u64 version, u8 type code, u64 sequences, u64 documents + 1, then i32 sequence
lengths in tokens, i64 sequence offsets in bytes, and i64 indices at which a document begins.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO

from launcher import files
from launcher.files import Aside

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_CODE = 8
INT32_CODE = 4
UINT16_VOCABULARY = 65500  # megatron's limit for two-byte tokens
WIDTHS = {1: 1, 2: 1, 3: 2, INT32_CODE: 4, 5: 8, UINT16_CODE: 2}
"""Bytes of a token by its type code; 6 and 7 are floating point, which no token is."""

READY = ".ready"
"""How the name of a complete index ends until its .bin has its name."""

HEADER = len(MAGIC) + struct.calcsize("<QBQQ")
READ_WHOLE = 1 << 24
"""Bytes of an index up to which every entry is checked: a second or so, a million sequences."""


def write(prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> int:
    """Write documents, each one sequence of token ids, and return how many tokens that is.

    Tokens are uint16 where `vocab_size` is under 65500, else int32, as Megatron chooses. Both
    files appear under their names only when they are complete.
    """
    two_bytes = vocab_size < UINT16_VOCABULARY
    lengths, offsets, at = array("i"), array("q"), 0
    with (
        Aside(_named(prefix, ".bin")) as data,
        Aside(_named(prefix, ".idx"), token=data.token) as index,
    ):
        for document in documents:
            tokens = array("H" if two_bytes else "i", document)
            lengths.append(len(tokens))
            offsets.append(at)
            at += len(tokens) * tokens.itemsize
            data.file.write(_little_endian(tokens))
        starts = array("q", range(len(lengths) + 1))
        code = UINT16_CODE if two_bytes else INT32_CODE
        index.file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, len(lengths), len(starts)))
        for column in (lengths, offsets, starts):
            index.file.write(_little_endian(column))
        data.complete()
        index.complete()
        publish(data, index)
    return sum(lengths)


def publish(data: Aside, index: Aside) -> None:
    """Name a .bin and .idx of one token that are complete, in place of older ones.

    From the index's first new name on the pair is sure to get there: `recover` goes on with it
    where this is killed.
    """
    prefix = data.target.with_suffix("")
    with files.folder_lock(prefix.parent):
        files.rename(index.path, _ready(index.target, index.token))
        _name_pair(prefix, index.token)
    data.file.close()
    index.file.close()


def recover(prefix: Path) -> None:
    """Name a pair that was complete when the process that wrote it was killed, where we may."""
    index = _named(prefix, ".idx")
    with suppress(OSError):
        if files.asides(index, READY):
            with files.folder_lock(prefix.parent):
                for token in files.asides(index, READY):
                    _name_pair(prefix, token)


def _name_pair(prefix: Path, token: str) -> None:
    """Name a complete pair; the old index goes before its .bin does, and the new one comes last."""
    data, index = _named(prefix, ".bin"), _named(prefix, ".idx")
    new = files.aside_path(data, token)
    if new.exists():
        index.unlink(missing_ok=True)
        os.replace(new, data)
        files.sync(prefix.parent)
    os.replace(_ready(index, token), index)
    files.sync(prefix.parent)


def _named(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _ready(index: Path, token: str) -> Path:
    return index.with_name(f".{index.name}.{token}{READY}")


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@dataclass(frozen=True)
class Index:
    """What an .idx says of its .bin."""

    sequences: int
    documents: int
    tokens: int | None
    token_bytes: int


class Damaged(ValueError):
    """A .bin and .idx that don't fit each other; the text says which file, and what is wrong."""


def check(prefix: Path) -> Index:
    """Read the index's header and ends, and all of it where it is small.

    The .bin is never read, only measured. `tokens` is None where the index is too large to be read
    whole. Raises Damaged where the two can't be what Megatron wrote, OSError where one can't be
    read.
    """
    recover(prefix)
    name, size = f"{prefix}.idx", os.path.getsize(f"{prefix}.bin")
    if not size:
        raise Damaged(f"{prefix}.bin: no tokens in it")
    with open(name, "rb") as file:
        held = os.fstat(file.fileno()).st_size
        header = file.read(HEADER)
        if len(header) < HEADER:
            raise Damaged(f"{name}: {held} bytes, and its header alone has {HEADER}")
        width, sequences, starts = _header(name, header)
        wanted = HEADER + 12 * sequences + 8 * starts
        if held not in (wanted, wanted + sequences):  # multimodal indices add a byte a sequence
            raise Damaged(f"{name}: {held} bytes, and its {sequences} sequences need {wanted}")
        tokens = None
        if wanted <= READ_WHOLE:
            tokens = _check_columns(name, file, width, sequences, starts)
        end = _end(file, sequences, starts, width)
    if end.documents != sequences:
        raise Damaged(f"{name}: its documents end at {end.documents} of {sequences} sequences")
    if end.bytes != size:
        raise Damaged(f"{prefix}.bin: {size} bytes, and its index ends at {end.bytes}")
    return Index(sequences, starts - 1, tokens, width)


def _header(name: str, header: bytes) -> tuple[int, int, int]:
    """Bytes of a token, sequences, and document starts."""
    if not header.startswith(MAGIC):
        raise Damaged(f"{name}: no index of Megatron's: it doesn't begin with {MAGIC[:7].decode()}")
    version, code, sequences, starts = struct.unpack("<QBQQ", header[len(MAGIC) :])
    if version != VERSION:
        raise Damaged(f"{name}: version {version}, and Megatron reads {VERSION}")
    if code not in WIDTHS:
        raise Damaged(f"{name}: type code {code}, which isn't one of tokens")
    if not sequences or not starts:
        raise Damaged(f"{name}: no sequences in it")
    return WIDTHS[code], sequences, starts


@dataclass(frozen=True)
class _End:
    """Where the last sequence ends in the .bin, and at which sequence the documents end."""

    bytes: int
    documents: int


def _end(file: IO[bytes], sequences: int, starts: int, width: int) -> _End:
    file.seek(HEADER + 4 * (sequences - 1))
    (length,) = struct.unpack("<i", file.read(4))
    file.seek(HEADER + 4 * sequences + 8 * (sequences - 1))
    (offset,) = struct.unpack("<q", file.read(8))
    file.seek(HEADER + 12 * sequences + 8 * (starts - 1))
    (documents,) = struct.unpack("<q", file.read(8))
    return _End(offset + length * width, documents)


def _check_columns(name: str, file: IO[bytes], width: int, sequences: int, starts: int) -> int:
    """Check every entry; the tokens in all."""
    lengths, offsets, documents = (
        _read(file, letter, count)
        for letter, count in (("i", sequences), ("q", sequences), ("q", starts))
    )
    at = 0
    for number, (length, offset) in enumerate(zip(lengths, offsets, strict=True)):
        if length < 0 or offset != at:
            raise Damaged(f"{name}: sequence {number} of {length} tokens at {offset}, not at {at}")
        at += length * width
    if documents[0] != 0 or any(a > b for a, b in pairwise(documents)):
        raise Damaged(f"{name}: its documents aren't in order")
    return at // width


def _read(file: IO[bytes], letter: str, count: int) -> array[int]:
    values = array(letter)
    values.frombytes(file.read(count * values.itemsize))
    if sys.byteorder == "big":
        values.byteswap()
    return values
