"""Rows of csv and parquet files, and parts of a text: records that aren't single lines."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

from launcher.data.faults import EXCERPT, DataError, Refused, excerpt
from launcher.data.records import BLANK, Block
from launcher.errors import UsageError
from launcher.screen import printable

Row = list[Any] | Refused
"""The values of the keys, or why there are none."""

ROWS, BYTES = 256, 1 << 21
"""Rows of a parquet file that are decoded at a time, at most, and about how many bytes of them."""


def units(text: IO[str], unit: str) -> Iterator[tuple[int, Row]]:
    """Documents of a text with the line at which each begins; empty ones are none."""
    lines: list[str] = []
    begun = 1
    for number, line in enumerate(text, 1):
        if unit == "line" or (unit == "paragraph" and not line.strip(BLANK)):
            if unit == "line":
                lines = [line.removesuffix("\n")]
                begun = number
            if "".join(lines).strip(BLANK):
                yield begun, ["".join(lines).removesuffix("\n")]
            lines, begun = [], number + 1
        else:
            lines.append(line)
    if "".join(lines).strip(BLANK):
        rest = "".join(lines)
        yield begun, [rest if unit == "file" else rest.removesuffix("\n")]


def csv_rows(
    name: str, text: IO[str], keys: Sequence[str], columns: Sequence[str], delimiter: str | None
) -> Iterator[tuple[int, Row]]:
    """The keys' values of each row, with the line at which it begins.

    `columns` names the columns of a file whose first row is data. No `delimiter`: a tab, and a
    quotation mark is a character like any other. Raises UsageError where a key has no column,
    DataError where a quotation is broken: nobody can say where the rows after it begin.
    """
    csv.field_size_limit(sys.maxsize)
    lines = _Remembered(text)
    reader = (
        csv.reader(lines, delimiter=delimiter, strict=True)
        if delimiter
        else csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE, strict=True)
    )
    width, places = len(columns), _find(name, columns, keys) if columns else []
    while True:
        line = reader.line_num + 1
        lines.begun = ""
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            open_ended = "end of data" in str(error)
            said = "a quotation begins here and has no end" if open_ended else f"not CSV: {error}"
            raise DataError(
                f"{name}:{line}: {said}\n  | {printable(excerpt(lines.begun))}",
                "Which rows follow can't be known, so --on-error skip doesn't leave it out.",
            ) from None
        if not row:
            continue
        if not width:
            width, places = len(row), _find(name, row, keys)
        elif len(row) == width:
            yield line, [row[place] for place in places]
        else:
            fields = f"{len(row)} field{'s' * (len(row) != 1)}"
            yield line, Refused(f"{fields}, and there are {width} columns", lines.begun)


class _Remembered:
    """Lines of a file, and the beginning of what was read since `begun` was emptied."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.begun = ""
        self._lines = iter(lines)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        if len(self.begun) < EXCERPT:
            self.begun += line[:EXCERPT]
        return line


def _find(name: str, header: Sequence[str], keys: Sequence[str]) -> list[int]:
    for key in keys:
        if header.count(key) != 1:
            told = ", ".join(field[:30] for field in header[:10])
            if any("\udc80" <= letter <= "\udcff" for field in header for letter in field):
                raise UsageError(
                    f"{name}: its first row is of another encoding: {told}", "--encoding gb18030"
                )
            raise UsageError(
                f"{name}: {'no' if key not in header else 'more than one'} column {key!r}: {told}",
                "Name the column with text: --json-keys content. Where the first row is data, "
                "name all: --csv-columns id,content",
            )
    return [header.index(key) for key in keys]


def parquet(name: str, keys: Sequence[str]) -> Iterator[tuple[float, Block]]:
    """Rows of a parquet file, and after which share of it they end.

    Raises UsageError where a key has no column, DataError where the file is damaged.
    """
    import pyarrow
    import pyarrow.parquet

    if name == "-":
        raise UsageError("parquet can't be read from standard input", "Give the file.")
    try:
        with pyarrow.parquet.ParquetFile(name, page_checksum_verification=True) as file:
            known = file.schema_arrow.names
            for key in keys:
                if known.count(key) != 1:
                    raise UsageError(
                        f"{name}: {'no' if key not in known else 'more than one'} column {key!r}: "
                        f"{', '.join(known[:10])}",
                        "Name the column with text: --json-keys content",
                    )
            total, done = max(file.metadata.num_rows, 1), 0
            for batch in _batches(file, keys):
                values = [_values(batch.column(key)) for key in keys]
                numbers = range(done + 1, done + 1 + batch.num_rows)
                done += batch.num_rows
                rows = [list(row) for row in zip(*values, strict=True)]
                yield done / total, Block(rows=rows, numbers=numbers)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = str(error).splitlines()[0]
        raise DataError(f"{name}: it can't be read: {said}", "Is it a complete copy?") from None


def _batches(file: Any, keys: Sequence[str]) -> Iterator[Any]:
    """The rows of the keys' columns, fewer at a time where they are long."""
    for number in range(file.num_row_groups):
        group = file.metadata.row_group(number)
        columns = [group.column(at) for at in range(group.num_columns)]
        size = sum(
            column.total_uncompressed_size
            for column in columns
            if column.path_in_schema.startswith(tuple(keys))
        )
        rows = min(max(BYTES * group.num_rows // max(size, 1), 1), ROWS)
        yield from file.iter_batches(rows, [number], list(keys))


def _values(column: Any) -> list[object]:
    """A column's values; bytes that aren't UTF-8 stay to be found in their record."""
    try:
        found: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        found = [*map(_value, column)]
    return [_text(value) if isinstance(value, bytes | list) else value for value in found]


def _value(scalar: Any) -> object:
    """A value of Arrow's; of a text that isn't UTF-8 its bytes."""
    import pyarrow

    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        if isinstance(scalar, pyarrow.BinaryScalar):
            return scalar.as_buffer().to_pybytes()
        if isinstance(scalar, pyarrow.ListScalar):
            return [*map(_value, scalar.values)]
        return {}  # of any other kind, it is no text in any case


def _text(value: object) -> object:
    """The texts of bytes, also of those in lists."""
    if isinstance(value, list):
        return [*map(_text, value)]
    return value.decode(errors="surrogateescape") if isinstance(value, bytes) else value
