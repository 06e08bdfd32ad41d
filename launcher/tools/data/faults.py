"""Errors in the input of a data job, each with file, line and reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from launcher.base.errors import LauncherError

EXCERPT = 200
"""Characters of a bad record that are shown or kept."""


class DataError(LauncherError):
    """A document that can't be read, or data files that don't fit: nothing was written."""

    exit_code = 1


@contextmanager
def named(name: str) -> Iterator[None]:
    """Name the input where the system can't read on within: a broken disk, a share that is gone."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, name) from None


class BadRecord(NamedTuple):
    """A record that gives no document; `at` counts records of its block from 0.

    A tuple, since a block may have a million of them.
    """

    at: int
    reason: str
    excerpt: str


class RecordRefusal(ValueError):
    """Why a record gives no document; `record` is what can be shown of it, where that is known."""

    def __init__(self, reason: str, record: str = "") -> None:
        super().__init__(reason)
        self.record = record


def excerpt(record: object) -> str:
    """The first EXCERPT characters of a record; a row is its values with commas between them."""
    if isinstance(record, list):
        return ", ".join(map(excerpt, record[:EXCERPT]))[:EXCERPT]
    if not isinstance(record, bytes):
        record = str(record)[:EXCERPT].encode("utf-8", "backslashreplace")
    begun = record[: 4 * EXCERPT]  # no character has more than 4 bytes
    return begun.decode("utf-8", "backslashreplace")[:EXCERPT]
