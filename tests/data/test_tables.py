"""Values of parquet columns: bytes are texts where they are UTF-8, in lists too."""

from __future__ import annotations

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from launcher.data import sources, tables
from launcher.data.records import documents

LIST = pyarrow.list_(pyarrow.binary())


def as_text(column: pyarrow.Array, kind: pyarrow.DataType) -> pyarrow.Array:
    """Bytes that are taken for UTF-8, whether they are or not."""
    if pyarrow.types.is_large_list(column.type) or pyarrow.types.is_list(column.type):
        values = as_text(column.values, kind)
        return type(column).from_arrays(column.offsets, values)
    return pyarrow.Array.from_buffers(kind, len(column), column.buffers())


def read(path: Path, column: pyarrow.Array) -> tuple[list[list[str]], list[str]]:
    """Each document's texts, and what is wrong with the others."""
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    texts: list[list[str]] = []
    reasons: list[str] = []
    for _, block in tables.parquet(str(path), ("text",), sources.LARGEST):
        found = documents(block, ("text",), None)
        rest = iter(found.texts[0])
        texts += [[next(rest) for _ in range(count)] for count in found.counts[0]]
        reasons += [f"{block.numbers[fault.at]}: {fault.reason}" for fault in found.faults]
    return texts, reasons


@pytest.mark.parametrize("list_of", [pyarrow.list_, pyarrow.large_list])
def test_lists_of_bytes_are_lists_of_texts(tmp_path: Path, list_of: object) -> None:
    rows = [[b"abc", "é".encode()], [b"\xff", b"d"], [b"e", None], []]
    column = pyarrow.array(rows, list_of(pyarrow.binary()))  # type: ignore[operator]
    wanted = (
        [["abc", "é"], []],
        ["2: not UTF-8: byte 0xff", "3: an item of 'text' is null, where a text is wanted"],
    )
    assert read(tmp_path / "a.parquet", column) == wanted
    assert read(tmp_path / "b.parquet", as_text(column, pyarrow.utf8())) == wanted


def test_what_is_no_text_is_told_as_that(tmp_path: Path) -> None:
    """Whatever is in it."""
    texts = as_text(pyarrow.array([b"a", b"\xff"], pyarrow.binary()), pyarrow.utf8())
    column = pyarrow.StructArray.from_arrays([texts], ["a"])
    said = "'text' is an object, where a text is wanted"
    assert read(tmp_path / "a.parquet", column) == ([], [f"1: {said}", f"2: {said}"])
    column = pyarrow.array([[[b"a"]]], pyarrow.list_(LIST))
    said = "1: an item of 'text' is a list, where a text is wanted"
    assert read(tmp_path / "a.parquet", column) == ([], [said])
