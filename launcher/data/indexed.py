"""Writes Megatron's indexed dataset: tokens in PREFIX.bin, where each sequence is in PREFIX.idx.

The format is that of megatron/core/datasets/indexed_dataset.py, little-endian throughout:
`MMIDIDX\\0\\0`, u64 version, u8 type code, u64 sequences, u64 documents + 1, then i32 sequence
lengths in tokens, i64 sequence offsets in bytes, and i64 indices at which a document begins.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_CODE = 8
INT32_CODE = 4
UINT16_VOCABULARY = 65500  # megatron's limit for two-byte tokens


def write(prefix: Path, documents: Iterable[Sequence[int]], vocab_size: int) -> int:
    """Write documents, each one sequence of token ids, and return how many tokens that is.

    Tokens are uint16 where `vocab_size` is under 65500, else int32, as Megatron chooses. Both
    files appear under their names only when they are complete.
    """
    two_bytes = vocab_size < UINT16_VOCABULARY
    lengths, offsets, at = array("i"), array("q"), 0
    with _complete(prefix, ".bin") as file:
        for document in documents:
            tokens = array("H" if two_bytes else "i", document)
            lengths.append(len(tokens))
            offsets.append(at)
            at += len(tokens) * tokens.itemsize
            file.write(_little_endian(tokens))
    starts = array("q", range(len(lengths) + 1))
    code = UINT16_CODE if two_bytes else INT32_CODE
    with _complete(prefix, ".idx") as file:
        file.write(MAGIC + struct.pack("<QBQQ", VERSION, code, len(lengths), len(starts)))
        for column in (lengths, offsets, starts):
            file.write(_little_endian(column))
    return sum(lengths)


def _little_endian(values: array[int]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


@contextmanager
def _complete(prefix: Path, suffix: str) -> Iterator[IO[bytes]]:
    """A file that takes its name only when the block that writes it ends without an error."""
    path = prefix.with_name(prefix.name + suffix)
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
