"""Reads rows of csv, parquet and Arrow files, and parts of a text."""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from io import StringIO
from typing import IO, Any

from launcher.base.errors import UsageError
from launcher.base.screen import printable
from launcher.tools.data.faults import EXCERPT, DataError, RecordRefusal, excerpt
from launcher.tools.data.records import BLANK, Block
from launcher.tools.data.workers import Workers

TableRow = list[Any] | RecordRefusal
"""The values of the keys, or why there are none."""

ROWS, BYTES = 256, 1 << 21
"""Rows of a parquet file that are decoded at a time, at most, and about how many bytes of them; as
many characters of a line are read at a time."""


class TextLines:
    """Lines of a text, in which a record may have so many characters: DataError where one has more.

    line, begun: where the record begins, and the first of what was read of it.
    """

    def __init__(self, name: str, text: IO[str], largest: int) -> None:
        self.name = name
        self._text = text
        self._largest = largest
        self.begin(1)

    def begin(self, line: int) -> None:
        """A record begins with the next line, whose number it is."""
        self.line, self.begun, self._size = line, "", 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        parts = [self._part()]
        while len(parts[-1]) == BYTES and parts[-1][-1] not in "\r\n":
            parts.append(self._part())
        if not parts[0]:
            raise StopIteration
        return "".join(parts)

    def _part(self) -> str:
        """A line, or a part of one: a long one is refused before all of it is read."""
        part = self._text.readline(BYTES)
        if len(self.begun) < EXCERPT:
            self.begun += part[:EXCERPT]
        self._size += len(part)
        if self._size > self._largest:
            raise DataError(
                f"{self.name}:{self.line}: {too_large(self._largest)}\n  | "
                f"{printable(excerpt(self.begun))}",
                "Where it ends isn't known, so --on-error skip doesn't leave it out.",
            )
        return part


def too_large(largest: int) -> str:
    """What is wrong with a record that is larger."""
    return f"more than {largest >> 20} MB, which --max-record raises"


def units(text: TextLines, unit: str) -> Iterator[tuple[int, TableRow]]:
    """Documents of a text with the line at which each begins; empty ones are none."""
    held = StringIO()  # a list of short lines takes ten times as much
    for number, line in enumerate(text, 1):
        if unit != "paragraph" or line.strip(BLANK):
            held.write(line)
        if unit == "line" or (unit == "paragraph" and not line.strip(BLANK)):
            yield from _unit(text.line, held.getvalue().removesuffix("\n"))
            held = StringIO()
            text.begin(number + 1)
    rest = held.getvalue()
    yield from _unit(text.line, rest if unit == "file" else rest.removesuffix("\n"))


def _unit(line: int, document: str) -> list[tuple[int, TableRow]]:
    return [(line, [document])] if document.strip(BLANK) else []


def csv_rows(
    lines: TextLines, keys: Sequence[str], columns: Sequence[str], delimiter: str | None
) -> Iterator[tuple[int, TableRow]]:
    """The keys' values of each row, with the line at which it begins.

    `columns` names the columns of a file whose first row is data. No `delimiter`: a tab, and a
    quotation mark is a character like any other. Raises UsageError where a key has no column,
    DataError where a quotation is broken: nobody can say where the rows after it begin.
    """
    csv.field_size_limit(sys.maxsize)
    reader = (
        csv.reader(lines, delimiter=delimiter, strict=True)
        if delimiter
        else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    )
    width, places = len(columns), _find(lines.name, columns, keys, NO_HEADER) if columns else []
    while True:
        lines.begin(reader.line_num + 1)
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            open_ended = "end of data" in str(error)
            said = "a quotation begins here and has no end" if open_ended else f"not CSV: {error}"
            raise DataError(
                f"{lines.name}:{lines.line}: {said}\n  | {printable(excerpt(lines.begun))}",
                "Which rows follow can't be known, so --on-error skip doesn't leave it out.",
            ) from None
        if not row:
            continue
        if not width:
            width, places = len(row), _find(lines.name, row, keys, NO_HEADER)
        elif len(row) == width:
            yield lines.line, [row[place] for place in places]
        else:
            fields = f"{len(row)} field{'s' * (len(row) != 1)}"
            yield lines.line, RecordRefusal(f"{fields}, and there are {width} columns", lines.begun)


def _find(name: str, header: Sequence[str], keys: Sequence[str], more: str = "") -> list[int]:
    """Where the keys' columns stand. Raises UsageError where one isn't there, or twice."""
    for key in keys:
        if header.count(key) != 1:
            told = ", ".join(field[:30] for field in header[:10])
            for other in DELIMITERS:
                if len(header) == 1 and key in header[0].split(other):
                    raise UsageError(
                        f"{name}: its first row has no comma, and {other!r} between its columns",
                        f"--csv-delimiter {other!r}",
                    )
            if any("\udc80" <= letter <= "\udcff" for field in header for letter in field):
                raise UsageError(
                    f"{name}: its first row is of another encoding: {told}", "--encoding gb18030"
                )
            raise UsageError(
                f"{name}: {'no' if key not in header else 'more than one'} column {key!r}: {told}",
                f"Name the column with text: --json-keys content{more}",
            )
    return [header.index(key) for key in keys]


DELIMITERS = (";", "\t", "|")
"""What stands between columns where it isn't a comma."""

NO_HEADER = ". Where the first row is data, name all: --csv-columns id,content"
COMPLETE = "Is it a complete copy?"


@contextmanager
def _arrow_errors(name: str) -> Iterator[None]:
    """Raise DataError for what Arrow says of a damaged file; the system's own errors stay."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).partition("\n")[0]
        raise DataError(f"{name}: it can't be read: {said}", COMPLETE) from None


def parquet(name: str, keys: Sequence[str], largest: int) -> Iterator[tuple[float, Block]]:
    """Rows of a parquet file, and after which share of it they end.

    Raises UsageError where a key has no column, DataError where the file is damaged or so packed
    that its rows have more than `largest` bytes on average.
    """
    import pyarrow.parquet

    if name == "-":
        raise UsageError("parquet can't be read from standard input", "Give the file.")
    with (
        _arrow_errors(name),
        pyarrow.parquet.ParquetFile(name, page_checksum_verification=True) as file,
    ):
        _find(name, _roots(file.schema_arrow.names, keys), keys)
        total, done = max(file.metadata.num_rows, 1), 0
        for batch in _batches(name, file, keys, largest):
            values = [_values(_column(batch, key)) for key in keys]
            numbers = range(done + 1, done + 1 + batch.num_rows)
            done += batch.num_rows
            rows: list[TableRow] = [list(row) for row in zip(*values, strict=True)]
            if batch.nbytes > largest:
                rows = [_limited(row, largest) for row in rows]
            yield done / total, Block(rows=rows, numbers=numbers)
        if done != file.metadata.num_rows:
            said = f"it has {done} rows, and says that it has {file.metadata.num_rows}"
            raise DataError(f"{name}: {said}", COMPLETE)


def _batches(name: str, file: Any, keys: Sequence[str], largest: int) -> Iterator[Any]:
    """The rows of the keys' columns, fewer at a time where they are long."""
    done = 0
    for number, (count, size) in enumerate(_groups(name, keys)):
        if size > largest * max(count, 1):
            raise DataError(
                f"{name}:{done + 1}: {too_large(largest)}, in each row on average",
                "Its group of rows isn't read, so --on-error skip doesn't leave it out.",
            )
        rows = min(max(BYTES * count // max(size, 1), 1), ROWS)
        for batch in file.iter_batches(rows, [number], list(keys)):
            few = max(BYTES * batch.num_rows // max(batch.nbytes, 1), 1)
            yield from (batch.slice(at, few) for at in range(0, batch.num_rows, few))
        done += count


def _groups(name: str, keys: Sequence[str]) -> list[tuple[int, int]]:
    """Of each group, its rows and the bytes of the keys' columns.

    Asked for in a process of its own: where a file is damaged, Arrow's answer may be an abort.
    """
    try:
        workers: Workers[str, list[tuple[int, int]]] = Workers(partial(_sizes, keys), 1)
        (found,) = workers.map([name])
    except DataError:
        raise DataError(
            f"{name}: it can't be read: what it says of its columns is damaged", COMPLETE
        ) from None
    return found


def _sizes(keys: Sequence[str], name: str) -> list[tuple[int, int]]:
    import pyarrow.parquet

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # an abort has words of its own
    with pyarrow.parquet.ParquetFile(name) as file:
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        found = []
        for group in groups:
            columns = [group.column(at) for at in range(group.num_columns)]
            sizes = (
                column.total_uncompressed_size
                for column in columns
                if column.path_in_schema.startswith(tuple(keys))
            )
            found.append((group.num_rows, sum(sizes)))
    return found


def _limited(row: Any, largest: int) -> TableRow:
    """The row, or why there is none where its texts are too long."""
    texts = (text for value in row for text in (value if isinstance(value, list) else [value]))
    size = sum(len(text) for text in texts if isinstance(text, str))
    return RecordRefusal(too_large(largest), excerpt(row)) if size > largest else row


def _values(column: Any) -> list[object]:
    """A column's values; bytes that aren't UTF-8 stay to be found in their record."""
    import pyarrow

    try:
        found: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        found = column.cast(pyarrow.binary()).to_pylist()
    return [v.decode(errors="surrogateescape") if isinstance(v, bytes) else v for v in found]


def arrow(name: str, keys: Sequence[str], largest: int) -> Iterator[tuple[float, Block]]:
    """Rows of a file of Arrow's, as feather and Hugging Face's datasets write it.

    Raises UsageError where a key has no column, DataError where the file is damaged.
    """
    import pyarrow

    if name == "-":
        raise UsageError("Arrow can't be read from standard input", "Give the file.")
    with _arrow_errors(name), pyarrow.OSFile(name) as file:
        schema, batches = _opened(file)
        _find(name, _roots(schema.names, keys), keys)
        done = 0
        for share, batch in batches:
            batch.validate(full=True)
            few = max(BYTES * batch.num_rows // max(batch.nbytes, 1), 1)
            for at in range(0, batch.num_rows, few):
                some = batch.slice(at, few)
                values = [_values(_column(some, key)) for key in keys]
                rows: list[TableRow] = [
                    _limited([*row], largest) for row in zip(*values, strict=True)
                ]
                yield share, Block(rows=rows, numbers=range(done + 1, done + 1 + some.num_rows))
                done += some.num_rows


def _opened(file: Any) -> tuple[Any, Iterator[tuple[float, Any]]]:
    """The schema of an Arrow file, and its batches, each with the share of the file it ends at.

    There are two forms: feather's, which says where its batches are, and a stream.
    """
    import pyarrow

    size = max(file.size(), 1)
    try:
        reader = pyarrow.ipc.open_file(file)
    except pyarrow.ArrowInvalid:
        file.seek(0)
        stream = pyarrow.ipc.open_stream(file)
        return stream.schema, ((file.tell() / size, batch) for batch in stream)
    count = reader.num_record_batches
    batches = (((at + 1) / count, reader.get_batch(at)) for at in range(count))
    return reader.schema, batches


def _roots(names: Sequence[str], keys: Sequence[str]) -> list[str]:
    """The columns, and the keys of what is within one: content.text of content."""
    within = [key for key in keys if key not in names and key.partition(".")[0] in names]
    return [*names, *within]


def _column(batch: Any, key: str) -> Any:
    """A column, or what is within one. Raises UsageError where that has no such field."""
    import pyarrow.compute

    if key in batch.schema.names:
        return batch.column(key)
    root, *fields = key.split(".")
    try:
        return pyarrow.compute.struct_field(batch.column(root), fields)
    except (pyarrow.ArrowException, KeyError):
        raise UsageError(
            f"no column {key!r}: {root} is {batch.schema.field(root).type}",
            "Name the column with text: --json-keys content",
        ) from None


COLUMNAR: dict[str, tuple[tuple[str, ...], Callable[..., Iterator[tuple[float, Block]]]]] = {
    "parquet": ((".parquet",), parquet),
    "arrow": ((".arrow", ".feather"), arrow),
}
"""Formats that are read by columns: how their names end, and what reads them, as `parquet` does.

To add one is to add a function and a line here.
"""
