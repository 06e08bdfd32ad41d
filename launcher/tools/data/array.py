"""Reads a list in JSON item by item, each as a line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import IO

from launcher.tools.data.faults import DataError
from launcher.tools.data.tables import too_large

PIECE = 1 << 20
"""Characters that are read at a time."""

SPACE = re.compile(r"[ \t\r\n]*")
ENDS = str.maketrans("\r\n", "  ")
"""White space is all that an end of line can be within an item."""


def lines(name: str, text: IO[str], largest: int) -> Iterator[bytes]:
    """The items of the list as lines of JSON, several in each piece.

    Raises DataError where it is no list of JSON to its end, or an item is larger than `largest`.
    """
    decode = json.JSONDecoder().raw_decode
    begun, at, number = text.read(PIECE), 0, 0
    at = _behind(begun, 0) + 1  # the list's [
    gathered = list[str]()
    while True:
        at = _behind(begun, at)
        if begun[at : at + 1] == "]":
            yield _joined(gathered)
            return
        try:
            _, end = decode(begun, at)
            then = _behind(begun, end)
            if then == len(begun):
                raise ValueError("it ends in the middle")  # or a number goes on in the next piece
        except RecursionError:
            raise _fault(name, number, "too many lists within lists") from None
        except ValueError as error:
            yield _joined(gathered)
            gathered, begun, at = [], begun[at:], 0
            more = text.read(PIECE + len(begun))
            if len(begun) > largest:
                raise _fault(name, number, too_large(largest)) from None
            if not more:
                raise _fault(name, number, f"not JSON to its end: {error}") from None
            begun += more
            continue
        gathered.append(begun[at:end].translate(ENDS))
        number, at = number + 1, then + 1
        if begun[then] == "]":
            yield _joined(gathered)
            return
        if begun[then] != ",":
            raise _fault(name, number, f"{begun[then]!r} where a comma or ] is wanted")


def _behind(text: str, at: int) -> int:
    """Where the white space from there on ends."""
    found = SPACE.match(text, at)
    return found.end() if found else at


def _joined(items: list[str]) -> bytes:
    return "".join(f"{item}\n" for item in items).encode(errors="surrogateescape")


def _fault(name: str, number: int, what: str) -> DataError:
    return DataError(
        f"{name}: item {number + 1} of its list: {what}",
        "Nobody can say where the items after it begin, so --on-error skip doesn't leave it out.",
    )
