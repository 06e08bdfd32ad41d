"""Extracts documents from a block of input: the texts of each key, or why there are none."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import intern
from typing import Any

import orjson

from launcher.tools.data.faults import BadRecord, RecordRefusal, excerpt

OTHER = "; --encoding names another, like gb18030"
BLANK = " \t\r\n"
"""An empty line has nothing else: the white space of JSON. Any other, like a form feed, is text."""


@dataclass(frozen=True)
class Block:
    """Some records of one input, in order.

    `lines` are whole lines, each a record: JSON or, with `plain`, the document itself. In their
    place `rows` may have the values of the keys, or what is wrong with them, and `numbers` the
    lines or rows at which they begin, from 1. `encoding` is what the rows were decoded by, where
    a user can name another.
    """

    lines: bytes = b""
    plain: bool = False
    rows: Sequence[Sequence[object] | RecordRefusal] = ()
    numbers: Sequence[int] = ()
    encoding: str = ""


@dataclass
class Documents:
    """What a block holds: of each key the texts, and how many of them each document has.

    `records` were read, of which `blank` are empty lines.
    """

    texts: list[list[str]]
    counts: list[list[int]]
    faults: list[BadRecord] = field(default_factory=list)
    records: int = 0
    blank: int = 0


def documents(
    block: Block,
    keys: Sequence[str],
    limit: int | None,
    check: Callable[[Sequence[list[str]]], object] | None = None,
) -> Documents:
    """Read a block, up to the fault of number `limit`, counted from 1; None for all of it.

    A document with a fault in one key is left out of all. `check` is given each document, the texts
    of each key, and raises RecordRefusal where it isn't wanted.
    """
    records: Sequence[Any] = block.rows or split(block.lines)
    quick = len(keys) == 1 and not block.rows and not block.plain and not check
    if quick and (one := _each(records, *keys)):
        return Documents([one], [[1] * len(one)], records=len(one))
    found = Documents([[] for _ in keys], [[] for _ in keys])
    read = partial(_row, block.encoding) if block.rows else _plain if block.plain else _parsed
    for at, record in enumerate(records):
        found.records += 1
        try:
            values = read(record, keys)
            texts: list[Any] = [v if type(v) is list else [v] for v in values]
            if check:
                check(texts)
        except RecordRefusal as refused:
            found.faults.append(
                BadRecord(at, intern(str(refused)), excerpt(refused.record or record))
            )
            if len(found.faults) == limit:
                break
            continue
        if not values:
            found.blank += 1
        for column, counts, more in zip(found.texts, found.counts, texts, strict=False):
            column += more
            counts.append(len(more))
    return found


def _each(lines: Sequence[bytes], key: str) -> list[str]:
    """The text of each line, the usual case in half the time; none where any line has no such."""
    try:
        texts = [orjson.loads(line)[key] for line in lines]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []
    return texts if {*map(type, texts)} == {str} else []


def split(lines: bytes) -> list[bytes]:
    """Lines as Python's text files have them, and so upstream: they end in LF, CR LF or CR."""
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    found = lines.split(b"\n")
    if not found[-1]:
        found.pop()
    return found


def _parsed(line: object, keys: Sequence[str]) -> list[object]:
    """The keys' values in a line of JSON; none in an empty line. Raises RecordRefusal."""
    assert isinstance(line, bytes)
    strict = False
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        if not line.strip(BLANK.encode()):
            return []
        record, strict = _slowly(line), True
    try:
        values = [record[key] if key in record else _within(record, key) for key in keys]
    except (KeyError, TypeError, IndexError):
        raise RecordRefusal(_lacking(record, keys)) from None
    for key, value in zip(keys, values, strict=True):
        if type(value) is not str or strict:
            _check(value, key)
    return values


def _within(record: Any, key: str) -> object:
    """The value of a key like content.text, which is text within content. Raises as [] does."""
    for part in key.split("."):
        record = record[part]
    return record


def _slowly(line: bytes) -> object:
    """What Python's own parser makes of a line that the quick one refuses: it takes NaN."""
    try:
        return json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise RecordRefusal(f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start}") from None
    except json.JSONDecodeError as error:
        raise RecordRefusal(f"not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise RecordRefusal(f"not JSON that can be read: {error}") from None


def _lacking(record: object, keys: Sequence[str]) -> str:
    if not isinstance(record, dict):
        return f"{_kind(record)}, where an object with {', '.join(keys)} is wanted"
    missing = ", ".join(repr(key) for key in keys if key not in record)
    has = ", ".join(repr(key)[:40] for key in list(record)[:8]) or "none"
    return f"no key {missing}; its keys: {has}"


def _check(value: object, key: str, encoding: str = "") -> None:
    """Raises RecordRefusal unless it is a text or a list of texts, each of which can be UTF-8."""
    texts = value if isinstance(value, list) else [value]
    for text in texts:
        if not isinstance(text, str):
            where = f"an item of {key!r}" if isinstance(value, list) else repr(key)
            raise RecordRefusal(f"{where} is {_kind(text)}, where a text is wanted")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            if "\udc80" <= half <= "\udcff":  # as a text file's undecodable byte is kept
                said = f"not {encoding.upper() or 'UTF-8'}: byte 0x{ord(half) - 0xDC00:02x}"
                raise RecordRefusal(said + (OTHER if encoding else "")) from None
            raise RecordRefusal(
                f"{key!r} has half of a surrogate pair, U+{ord(half):04X}"
            ) from None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    names |= {int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _plain(line: object, keys: Sequence[str]) -> list[object]:
    """A line that is a document; none in an empty line."""
    assert isinstance(line, bytes)
    try:
        return [line.decode()] if line.strip(BLANK.encode()) else []
    except UnicodeDecodeError as error:
        said = f"not UTF-8: byte 0x{line[error.start]:02x} at {error.start}{OTHER}"
        raise RecordRefusal(said) from None


def _row(encoding: str, row: object, keys: Sequence[str]) -> list[object]:
    if isinstance(row, RecordRefusal):
        raise row
    assert isinstance(row, list)
    for key, value in zip(keys, row, strict=True):
        _check(value, key, encoding)
    return row
