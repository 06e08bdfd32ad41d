"""Chooses lines of a run's output: the last ones, and those from some time on."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta, tzinfo

from launcher.base.errors import UsageError

Piece = tuple[bool, bytes]
"""A piece of output, and whether it is of stderr."""

TIME = re.compile(rb"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
"""How the lines of a training log begin that have a time: upstream's and ours."""

UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def lines(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The output line by line, each stream's own."""
    begun = {False: b"", True: b""}
    for is_error, data in pieces:
        *whole, begun[is_error] = (begun[is_error] + data).split(b"\n")
        yield from ((is_error, line + b"\n") for line in whole)
    yield from ((is_error, line) for is_error, line in begun.items() if line)


def last(found: Iterable[Piece], number: int) -> Iterator[Piece]:
    """The last lines."""
    yield from deque(found, maxlen=number)


def since(found: Iterable[Piece], start: datetime, *, begun: bool = False) -> Iterator[Piece]:
    """The lines from the first on that has such a time or a later one; all where `begun`."""
    for is_error, line in found:
        if not begun and (told := TIME.search(line)):
            begun = datetime.fromisoformat(told[1].decode()) >= start
        if begun:
            yield is_error, line


def parse_since(text: str, zone: tzinfo | None) -> datetime:
    """The time that `text` names, in the log's own zone: an age as 30s, 10m, 2h or 1d, or a time.

    `zone` is that of the log, None for this machine's. Raises UsageError.
    """
    if told := re.fullmatch(r"(\d{1,7})([smhd])", text):
        back = timedelta(**{UNITS[told[2]]: int(told[1])})
        return datetime.now(zone).replace(tzinfo=None, microsecond=0) - back
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        raise UsageError(
            f"--since {text}: neither an age nor a time",
            'For example 30s, 10m, "2026-05-01 12:30".',
        ) from None
