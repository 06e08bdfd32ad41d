"""Reads inputs as blocks of records: files, globs and standard input, compressed or not."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Container, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from glob import glob
from pathlib import Path
from typing import IO

from launcher.base.errors import UsageError, nearest
from launcher.base.unpack import DamagedFile, packing, unpacked
from launcher.tools.data import array, kinds, tables
from launcher.tools.data.faults import DataError, RecordRefusal, excerpt, named
from launcher.tools.data.kinds import CountedInput
from launcher.tools.data.records import Block

BLOCK = 1 << 21
"""Bytes of text that are read, carried and tokenized at a time; a record is never divided."""
RECORDS = 1 << 16
"""Lines of a block, about: what is kept of each takes more than a short one's text."""
LARGEST = 64 << 20
"""Bytes of a record at most, unless another limit is given: twenty times War and Peace. A worker
takes up to twelve times as much for it, and with no limit, a packed file of some megabytes that is
one line takes all memory."""
STDIN = "-"
FORMATS = {
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "txt",
    ".text": "txt",
    **{ending: name for name, (endings, _) in tables.COLUMNAR.items() for ending in endings},
}
"""What a file holds, by how its name ends."""

PACKED = (".gz", ".zst", ".bz2", ".xz")
REJECTS = ".rejects.jsonl"
"""How the names of lists of bad records end."""
SAVED = "state.json"
"""What a folder has that a data set was saved in."""
UNITS = ("line", "paragraph", "file")
BOM = codecs.BOM_UTF8


@dataclass(frozen=True)
class ReadingOptions:
    """How inputs are read.

    keys: what is taken of each record; plain text has one, which only names the output
    format: one of FORMATS; None to go by the file's name
    columns: names of a csv file's columns, where its first row is data
    delimiter: of csv; None for a comma, and for .tsv, which has a tab and no quotations
    encoding: of csv and txt
    unit: what of a text file is a document: a line, a paragraph, the file
    shard: which part of how many, from 0: the records that begin in it, by bytes on the disk
    largest: how many bytes a record may have, at least BLOCK; of decoded text, characters
    """

    keys: tuple[str, ...] = ("text",)
    format: str | None = None
    columns: tuple[str, ...] = ()
    delimiter: str | None = None
    encoding: str = "utf-8"
    unit: str = "line"
    shard: tuple[int, int] = (0, 1)
    largest: int = LARGEST


@dataclass(frozen=True)
class InputPart:
    """An input, and the part of it that is read, in bytes as it lies on the disk.

    `whole` says that it is all of it; else its lines begin at `start` and end at `stop`.
    """

    name: str
    format: str
    start: int
    stop: int
    whole: bool

    @property
    def told(self) -> str:
        """Its name in messages; bytes of it that aren't UTF-8 as \\udc…."""
        name = self.name.encode("utf-8", "backslashreplace").decode()
        return "standard input" if name == STDIN else name


@dataclass(frozen=True)
class Position:
    """Where a block comes from: the source, from 0, and how many bytes of all have been read."""

    source: int
    read: int


def sources(inputs: Sequence[str], reading: ReadingOptions) -> list[InputPart]:
    """The inputs' files in their order, a pattern's sorted, or the shard's part of them.

    Raises UsageError where there is no such file, its kind isn't known, or it can't be divided.
    """
    names = [name for pattern in inputs for name in _expand(pattern)]
    part, parts = reading.shard
    if STDIN in names and (parts > 1 or names.count(STDIN) > 1):
        raise UsageError("standard input can't be divided or read twice", "Give files.")
    if parts > 1:
        for name in names:
            if not os.path.isfile(name):
                raise UsageError(
                    f"{name}: it can't be divided: it isn't a file", "Without --shard it is read."
                )
    found: list[InputPart] = []
    sizes = [0 if name == STDIN else os.path.getsize(name) for name in names]
    total, at = sum(sizes), 0
    first, last = total * part // parts, total * (part + 1) // parts
    for name in names:
        kinds.refuse_stand_in(name)
    for name, size in zip(names, sizes, strict=True):
        kind, end = _format(name, reading), at + size
        if parts == 1 or (first <= at and end <= last and at < last):
            found.append(InputPart(name, kind, 0, size, True))
        elif not _is_divisible(name, kind, reading):
            if first <= at < last:
                found.append(InputPart(name, kind, 0, size, True))
        elif first < end and at < last:
            found += _part(name, kind, max(first - at, 0), min(last, end) - at)
        at = end
    return found


def without(found: Sequence[InputPart], gave: Container[int]) -> tuple[str, ...]:
    """The names of those that gave nothing; a part of a file may do so."""
    return tuple(source.told for at, source in enumerate(found) if source.whole and at not in gave)


def _expand(pattern: str) -> list[str]:
    if pattern == STDIN:
        return [pattern]
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        return _saved(path)
    if path.exists():
        return [str(path)]
    if found := sorted(name for name in glob(str(path), recursive=True) if _is_meant(name, path)):
        return found
    raise UsageError(f"{pattern}: no such file")


def _saved(folder: Path) -> list[str]:
    """The files of a data set that Hugging Face's datasets has saved in a folder.

    Raises UsageError for any other folder, and for one of several splits.
    """
    splits = [one.parent.name for one in sorted(folder.glob(f"*/{SAVED}"))]
    if (folder / "dataset_dict.json").is_file() and splits:
        raise UsageError(
            f"{folder}: a saved data set of several splits: {', '.join(splits)}",
            f"Name one: {folder / splits[0]}",
        )
    found = sorted(map(str, folder.glob("*.arrow"))) if (folder / SAVED).is_file() else []
    if not found:
        raise UsageError(f"{folder}: a folder", f"Name its files: '{folder}/*.jsonl'")
    return [name for name in found if not os.path.basename(name).startswith("cache-")]


def _is_meant(name: str, pattern: Path) -> bool:
    """Whether a pattern's file is an input: no folder, and no list of bad records."""
    listed = name.endswith(REJECTS) and not pattern.name.endswith(REJECTS)
    return not listed and not os.path.isdir(name)


def refuse_own(found: Sequence[InputPart], written: Sequence[Path]) -> None:
    """Raises UsageError where an input is a file that is to be written."""
    own = {_identity(path) for path in written} - {None}
    for source in found if own else ():
        if _identity("/dev/stdin" if source.name == STDIN else source.name) in own:
            raise UsageError(
                f"{source.told}: it would be written while it is read",
                "Take another name for the output, or a pattern that leaves it out.",
            )


def _identity(name: str | Path) -> tuple[int, int] | None:
    """Which file it is, whatever its name; None where it can't be seen."""
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _format(name: str, reading: ReadingOptions) -> str:
    if reading.format:
        if reading.format not in FORMATS.values():
            raise UsageError(
                f"--format {reading.format}: no format that is known",
                nearest(reading.format, [*dict.fromkeys(FORMATS.values())]),
            )
        return reading.format
    if name == STDIN:
        return "jsonl"
    suffix = _suffix(name)
    if suffix not in FORMATS:
        raise UsageError(
            f"{name}: {suffix or 'no ending'} doesn't say what it is",
            f"Say it: --format jsonl. {nearest(suffix, list(FORMATS))}",
        )
    return FORMATS[suffix]


def _suffix(name: str) -> str:
    """The ending that names what a file holds, without that of its packing."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def _is_divisible(name: str, kind: str, reading: ReadingOptions) -> bool:
    """A file in which the next record is found from any byte on."""
    begun = kinds.beginning(name)
    if packing(begun[:8]) or (kind == "jsonl" and kinds.is_array(begun)):
        return False
    return kind == "jsonl" or (kind == "txt" and reading.unit == "line" and _is_utf8(reading))


def _is_utf8(reading: ReadingOptions) -> bool:
    try:
        io.TextIOWrapper(io.BytesIO(), reading.encoding)  # refuses hex, rot13 and their like
        return codecs.lookup(reading.encoding).name == "utf-8"
    except (LookupError, ValueError):
        raise UsageError(
            f"{reading.encoding}: an unknown encoding", "Known are utf-8, gb18030, latin-1 …"
        ) from None


def blocks(found: Sequence[InputPart], reading: ReadingOptions) -> Iterator[tuple[Position, Block]]:
    """All records of the sources in order.

    Raises DataError where a file can't be read to its end, UsageError for a table without a
    wanted column, OSError where the system can't read it.
    """
    done = 0
    for number, source in enumerate(found):
        with (
            named(source.told),
            _stdin() if source.name == STDIN else open(source.name, "rb") as file,
        ):
            if source.format in tables.COLUMNAR:
                _, read = tables.COLUMNAR[source.format]
                for share, block in read(source.name, reading.keys, reading.largest):
                    yield Position(number, done + int(share * source.stop)), block
            else:
                counted = CountedInput(file)
                for block in _readable(counted, file, source, reading):
                    yield Position(number, done + counted.count), block
        done += source.stop - source.start


def _stdin() -> IO[bytes]:
    if sys.stdin is None:
        raise UsageError("standard input is closed", "Give it a file: < corpus.jsonl")
    return sys.stdin.buffer


def _readable(
    counted: CountedInput, file: IO[bytes], source: InputPart, reading: ReadingOptions
) -> Iterator[Block]:
    """Blocks of a file that isn't a table of its own kind."""
    try:
        if not source.whole:
            file.seek(source.start)
            yield from _lines(_pieces(file, source.stop - source.start, counted), source, reading)
            return
        content = unpacked(io.BufferedReader(counted, BLOCK))
        yield from _content(content, source, reading)
    except (DamagedFile, UnicodeError) as error:
        raise DataError(
            f"{source.told}: it can't be read to its end: {error}", "Is it a complete copy?"
        ) from None


def _line_at(file: IO[bytes], at: int) -> int:
    """Where the first line that begins at a byte or after it begins; only LF ends lines here."""
    if at == 0:
        return 0
    at = file.seek(at - 1)
    while piece := file.read(BLOCK):
        if end := piece.find(b"\n") + 1:
            return at + end
        at += len(piece)
    return at


def _pieces(file: IO[bytes], left: int, counted: CountedInput | None = None) -> Iterator[bytes]:
    while left > 0 and (piece := file.read(min(BLOCK, left))):
        left -= len(piece)
        if counted:
            counted.count += len(piece)
        yield piece


def _part(name: str, kind: str, first: int, last: int) -> list[InputPart]:
    """The lines that begin between two bytes of a file, if there are any."""
    with open(name, "rb") as file:
        start, stop = _line_at(file, first), _line_at(file, last)
    return [InputPart(name, kind, start, stop, False)] if start < stop else []


def lines_before(source: InputPart) -> int:
    """How many lines begin before the part of the file that is read, by records.split's rules."""
    if not source.start:  # maybe a pipe, which can't be opened again
        return 0
    found, last = 0, b""
    with open(source.name, "rb") as file:
        for piece in _pieces(file, source.start):
            found += piece.count(b"\n") + piece.count(b"\r") - (last + piece).count(b"\r\n")
            last = piece[-1:]
    return found


def _whole_lines(pieces: Iterable[bytes], largest: int) -> Iterator[bytes | RecordRefusal]:
    """A file in pieces that end where a line does; a long line isn't read twice.

    The end is LF, or CR where a piece has no LF: the last CR not before it is seen that no LF
    follows. In the place of a line of more than `largest` bytes is what is wrong with it; see
    `_passed`.
    """
    pieces = iter(pieces)
    begun: list[bytes] = []
    size = 0
    for piece in pieces:
        if begun and begun[-1].endswith(b"\r") and not piece.startswith(b"\n"):
            yield b"".join(begun)
            begun, size = [], 0
        if size + len(piece) > largest and size + (_line_end(piece) or len(piece)) > largest:
            yield RecordRefusal(tables.too_large(largest), excerpt(b"".join((*begun, piece)[:2])))
            begun, size, piece = [], 0, (yield from _passed(pieces, piece))
        cut = piece.rfind(b"\n") + 1 or piece.rfind(b"\r", 0, -1) + 1
        if cut:
            yield b"".join((*begun, piece[:cut]))
            begun, size = [], 0
        begun.append(piece[cut:])
        size += len(piece) - cut
    if rest := b"".join(begun):
        yield rest


def _passed(pieces: Iterator[bytes], piece: bytes) -> Generator[bytes, None, bytes]:
    """Read on to the line's end, with nothing for each piece, and return what is behind it.

    So warnings about the line reach the user at once, however long it is.
    """
    while not (end := _line_end(piece)):
        yield b""
        if not (more := next(pieces, b"")):
            return b""
        piece = piece[-1:] + more
    return piece[end:]


def _line_end(piece: bytes) -> int:
    """How long the first line is, with its end; 0 where it goes on, as behind a CR that is last."""
    end = piece.find(b"\n") + 1
    cr = piece.find(b"\r", 0, (end or len(piece)) - 1) + 1
    return cr if cr and cr + 1 != end else end


def _lines(pieces: Iterator[bytes], source: InputPart, reading: ReadingOptions) -> Iterator[Block]:
    mark = b"" if source.start else BOM
    for lines in _whole_lines(pieces, reading.largest):
        if lines and isinstance(lines, bytes):
            for few in _whole_lines(_few(lines.removeprefix(mark)), reading.largest):
                yield _block(few, source)
        else:
            yield _block(lines, source)
        mark = b""


def _block(lines: bytes | RecordRefusal, source: InputPart) -> Block:
    if isinstance(lines, RecordRefusal):
        return Block(rows=[lines])
    return Block(lines=lines, plain=source.format == "txt")


def _few(lines: bytes) -> Iterator[bytes]:
    """Lines as pieces of equal size, which have RECORDS of them on average where they have more."""
    ends = lines.count(b"\n") + lines.count(b"\r")
    size = len(lines) * RECORDS // max(ends, RECORDS) or 1
    return (lines[at : at + size] for at in range(0, len(lines), size))


def _content(
    file: io.BufferedReader, source: InputPart, reading: ReadingOptions
) -> Iterator[Block]:
    """Lines of an unpacked file, rows of a table, or of plain text paragraphs or all of it."""
    plain, table = source.format == "txt", source.format == "csv"
    if plain and len(reading.keys) > 1:
        raise UsageError("plain text has one key", "--json-keys text")
    if source.format == "jsonl" and kinds.is_array(file.peek(kinds.BEGINNING)):
        items = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape")
        return _lines(array.lines(source.told, items, reading.largest), source, reading)
    if not table and (not plain or (_is_utf8(reading) and reading.unit == "line")):
        return _lines(iter(partial(file.read, BLOCK), b""), source, reading)
    decoded = _decoded(file, reading, "" if table else None)
    text = tables.TextLines(source.told, decoded, reading.largest)
    if not table:
        return _gathered(tables.units(text, reading.unit), reading.encoding)
    delimiter = reading.delimiter or (None if _suffix(source.name) == ".tsv" else ",")
    rows = tables.csv_rows(text, reading.keys, reading.columns, delimiter)
    return _gathered(rows, reading.encoding)


def _decoded(file: IO[bytes], reading: ReadingOptions, newline: str | None) -> IO[str]:
    """The file as text; a byte that isn't of the encoding stays to be found in its record."""
    encoding = "utf-8-sig" if _is_utf8(reading) else reading.encoding
    return io.TextIOWrapper(file, encoding, errors="surrogateescape", newline=newline)


def _gathered(rows: Iterator[tuple[int, tables.TableRow]], encoding: str) -> Iterator[Block]:
    """Rows with their numbers, as blocks of about the same size."""
    gathered: list[tables.TableRow] = []
    numbers: list[int] = []
    size = 0
    for number, row in rows:
        gathered.append(row)
        numbers.append(number)
        size += 100 + (sum(map(len, row)) if isinstance(row, list) else 0)
        if size > BLOCK:
            yield Block(rows=gathered, numbers=numbers, encoding=encoding)
            gathered, numbers, size = [], [], 0
    if gathered:
        yield Block(rows=gathered, numbers=numbers, encoding=encoding)
