"""Checks, counts, compares and joins .bin and .idx files in bounded memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from launcher.base.errors import UsageError
from launcher.runs.datasets import indexed
from launcher.runs.datasets.indexed import HEADER, PIECE, DatasetIndex, IndexedOutput
from launcher.runs.datasets.output import publish, writing
from launcher.tools.data.faults import DataError
from launcher.tools.data.tokenizers import TokenizerChoice

BYTES = 1 << 22
"""Bytes of tokens that are read at a time."""
KINDS = {indexed.UINT16_CODE: np.dtype("<u2"), indexed.INT32_CODE: np.dtype("<i4")}
PATHS = ("vocab_file", "merge_file", "model")
"""What of a tokenizer are files."""
SHARD = re.compile(r"\.(?P<part>\d+)-of-(?P<parts>\d+)_")
"""What the name of a shard's output has in it."""


class IndexedData:
    """A data file whose index fits it: the index's columns, which stay on the disk.

    lengths: of each sequence, in tokens; offsets: where it begins in the .bin, in bytes
    starts: the sequence with which each document begins, and last the number of sequences
    """

    def __init__(self, prefix: Path, index: DatasetIndex) -> None:
        self.prefix, self.kind, self.tokens = prefix, KINDS[index.code], index.tokens
        self.sequences, self.documents = index.sequences, index.documents
        self.lengths = self._column("<i4", HEADER, self.sequences)
        self.offsets = self._column("<i8", HEADER + 4 * self.sequences, self.sequences)
        self.starts = self._column("<i8", HEADER + 12 * self.sequences, self.documents + 1)

    def _column(self, kind: str, at: int, count: int) -> NDArray[Any]:
        if not count:
            return np.empty(0, kind)
        return np.memmap(f"{self.prefix}.idx", kind, "r", at, count)

    def counts(self) -> Iterator[NDArray[Any]]:
        """Sequences of each document, some at a time."""
        return _steps(_pieces(self.starts))

    def sizes(self) -> Iterator[NDArray[Any]]:
        """Tokens of each document, some at a time."""
        return _steps(map(self._first_token, _pieces(self.starts)))

    def _first_token(self, sequences: NDArray[Any]) -> NDArray[Any]:
        found = np.full(len(sequences), self.tokens)
        inside = sequences < self.sequences
        found[inside] = self.offsets[sequences[inside]] // self.kind.itemsize
        return found

    def document(self, number: int, most: int) -> list[int]:
        """The first tokens of a document, at most so many."""
        first, end = self._first_token(self.starts[number : number + 2]).tolist()
        with open(f"{self.prefix}.bin", "rb") as file:
            file.seek(first * self.kind.itemsize)
            found = np.frombuffer(file.read(min(end - first, most) * self.kind.itemsize), self.kind)
        return [int(token) for token in found]


def _pieces(column: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """A column, some of it at a time."""
    return (column[at : at + PIECE] for at in range(0, len(column), PIECE))


def _steps(pieces: Iterator[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    """The differences of neighbours, over the pieces' bounds."""
    last: NDArray[Any] = np.empty(0, np.int64)
    for piece in pieces:
        yield np.diff(np.concatenate((last, piece)))
        last = piece[-1:]


def open_data(prefix: Path) -> IndexedData:
    """Read the index's header, and check every entry of it against the .bin.

    `prefix` may have the ending of either file. Raises DataError where they don't fit each other,
    UsageError where one isn't there.
    """
    if prefix.suffix in (".bin", ".idx"):
        prefix = prefix.with_suffix("")
    indexed.recover(prefix)
    for suffix in (".idx", ".bin"):
        if not Path(f"{prefix}{suffix}").is_file():
            raise UsageError(f"{prefix}{suffix}: no such file", "Give the name without .bin, .idx.")
    try:
        index = indexed.read_index(prefix)
        if index.code not in KINDS or index.modes:
            raise indexed.DamagedDataset(
                f"{prefix}.idx: type code {index.code}, or a mode a sequence"
            )
        data = IndexedData(prefix, index)
        _check(data)
    except indexed.DamagedDataset as damaged:
        raise DataError(str(damaged), "It has to be made anew.") from None
    return data


def _check(data: IndexedData) -> None:
    """Check every entry; `read_index` has seen the ends. Raises DamagedDataset."""
    at = number = 0
    name = f"{data.prefix}.idx"
    for lengths in _pieces(data.lengths):
        ends = np.cumsum(lengths, dtype=np.int64) * data.kind.itemsize + at
        begins = np.concatenate(([at], ends[:-1]))
        bad = (lengths < 0) | (data.offsets[number : number + len(lengths)] != begins)
        if bad.any():
            bad_one = number + int(bad.argmax())
            raise indexed.DamagedDataset(
                f"{name}: sequence {bad_one} isn't where the last one ends"
            )
        at, number = int(ends[-1]), number + len(lengths)
    last = 0
    for piece, starts in enumerate(_pieces(data.starts)):
        if (piece == 0 and starts[0]) or (np.diff(np.concatenate(([last], starts))) < 0).any():
            raise indexed.DamagedDataset(f"{name}: its documents aren't in order")
        last = int(starts[-1])


@dataclass(frozen=True)
class DocumentSizes:
    """How long documents are, in tokens. `bars` are counts of 0, 1, 2 to 3, 4 to 7, …"""

    shortest: int
    longest: int
    empty: int
    bars: tuple[int, ...]


def sizes(data: IndexedData) -> DocumentSizes:
    """Count documents by the power of two at or below their tokens."""
    bars: NDArray[Any] = np.zeros(65, np.int64)
    shortest, longest = None, 0
    for piece in data.sizes():
        if not len(piece):
            continue
        bars += np.bincount(np.frexp(piece)[1], minlength=65)
        least = int(piece.min())
        shortest = least if shortest is None else min(shortest, least)
        longest = max(longest, int(piece.max()))
    used = int(np.flatnonzero(bars).max(initial=0)) + 1
    return DocumentSizes(shortest or 0, longest, int(bars[0]), tuple(bars[:used].tolist()))


def difference(a: IndexedData, b: IndexedData) -> str:
    """The first thing in which two differ; empty where both files are the same bytes."""
    for what in ("kind", "documents", "sequences", "tokens"):
        if getattr(a, what) != getattr(b, what):
            return f"{what}: {getattr(a, what)} and {getattr(b, what)}"
    columns: dict[str, Callable[[IndexedData], Iterator[NDArray[Any]]]] = {
        "sequences of document": IndexedData.counts,
        "tokens of document": IndexedData.sizes,
        "tokens of sequence": lambda data: _pieces(data.lengths),
    }
    for what, column in columns.items():
        at = 0
        for one, other in zip(column(a), column(b), strict=True):
            if len(unlike := np.flatnonzero(one != other)):
                here = int(unlike[0])
                return f"{what} {at + here}: {one[here]} and {other[here]}"
            at += len(one)
    with open(f"{a.prefix}.bin", "rb") as left, open(f"{b.prefix}.bin", "rb") as right:
        at = 0
        while piece := left.read(BYTES):
            if piece != (other_piece := right.read(BYTES)):
                tokens = np.frombuffer(piece, a.kind), np.frombuffer(other_piece, b.kind)
                here = int(np.flatnonzero(tokens[0] != tokens[1])[0])
                return _told(a, at + here, int(tokens[0][here]), int(tokens[1][here]))
            at += len(piece) // a.kind.itemsize
    return ""


def _told(data: IndexedData, token: int, one: int, other: int) -> str:
    """Name the document in which a token lies."""
    sequence = int(np.searchsorted(data.offsets, token * data.kind.itemsize, "right")) - 1
    document = int(np.searchsorted(data.starts, sequence, "right")) - 1
    at = token - int(data.offsets[sequence]) // data.kind.itemsize
    return f"token {at} of sequence {sequence}, in document {document}: {one} and {other}"


def merge(prefixes: Sequence[Path], target: Path) -> IndexedOutput:
    """Join data files in the order given: what one job over all their inputs would have written.

    Raises DataError where one is damaged, UsageError where their types differ, shards of one job
    are missing, one is named twice, or one of them is the target.
    """
    parts = [open_data(prefix) for prefix in prefixes]
    _check_shards([part.prefix for part in parts])
    files = [Path(f"{part.prefix}.bin").resolve() for part in parts]
    for number, file in enumerate(files):
        if file in files[:number]:
            raise UsageError(f"{prefixes[number]}: it is named twice", "Name each once.")
    if Path(f"{target}.bin").resolve() in files:
        raise UsageError(f"{target}: it would be written while it is read", "Take another name.")
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise UsageError("some have tokens of two bytes and some of four", "Make them alike.")
    with writing(target), closing(IndexedOutput(target, kinds.pop().itemsize)) as output:
        for part in parts:
            for lengths in _pieces(part.lengths):
                output.add(b"", lengths, ())
            for counts in part.counts():
                output.add(b"", (), counts.astype("<i4"))
            with open(f"{part.prefix}.bin", "rb") as tokens:
                while piece := tokens.read(BYTES):
                    output.add(piece, (), ())
        output.made = _made_alike([how_made(part) for part in parts])
        publish([output])
    return output


def how_made(data: IndexedData) -> dict[str, Any] | None:
    """What PREFIX.made.json says; None where there is none, or it is of other files."""
    return indexed.how_made(data.prefix, data.documents, data.tokens)


def made_by(data: IndexedData) -> TokenizerChoice | None:
    """The tokenizer that made the files, where a record beside them says so."""
    with suppress(KeyError, TypeError):
        said = (how_made(data) or {})["tokenizer"]
        known = {each.name: said.get(each.name, each.default) for each in fields(TokenizerChoice)}
        paths = {name: known[name] and Path(known[name]) for name in PATHS}
        return TokenizerChoice(**known | paths)
    return None


def _made_alike(records: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What holds for all of them together; None where they were made in different ways."""
    counted = ("inputs", "documents", "tokens")
    alike = [{k: v for k, v in one.items() if k not in counted} for one in records if one]
    if len(alike) < len(records) or any(one != alike[0] for one in alike):
        return None
    return {**alike[0], "inputs": [name for one in records if one for name in one["inputs"]]}


def _check_shards(prefixes: Sequence[Path]) -> None:
    """The shards of each job, by their names, are all there, once, and in order."""
    jobs: dict[tuple[str, str], list[int]] = {}
    for prefix in prefixes:
        if found := SHARD.search(prefix.name):
            name = SHARD.sub(f".*-of-{found['parts']}_", prefix.name, count=1)
            jobs.setdefault((name, found["parts"]), []).append(int(found["part"]))
    for (name, parts), have in jobs.items():
        if have != [*range(1, int(parts) + 1)]:
            told = ", ".join(map(str, have))
            raise UsageError(
                f"{name}: of {parts} shards, these and in this order: {told}", "All, in order."
            )
