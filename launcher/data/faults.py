"""What is wrong with an input: the errors of a data job, each with file, line and reason."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.errors import LauncherError

EXCERPT = 200
"""Characters of a bad record that are shown or kept."""


class DataError(LauncherError):
    """A document that can't be read, or data files that don't fit: nothing was written."""

    exit_code = 1


@dataclass(frozen=True)
class Fault:
    """A record that gives no document; `at` counts records of its block from 0."""

    at: int
    reason: str
    excerpt: str


class Refused(ValueError):
    """Why a record gives no document; `record` is what can be shown of it, where that is known."""

    def __init__(self, reason: str, record: str = "") -> None:
        super().__init__(reason)
        self.record = record


def excerpt(record: object) -> str:
    """The beginning of a record, as text."""
    if isinstance(record, bytes):
        return record[:EXCERPT].decode("utf-8", "backslashreplace")
    return str(record)[:EXCERPT].encode("utf-8", "backslashreplace").decode()
