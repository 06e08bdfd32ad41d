"""Recognises files that are not what they were given for, by how they begin; counts their bytes."""

from __future__ import annotations

import io
import re
import select
from pathlib import Path
from typing import IO, Any, cast

from launcher.base.errors import UsageError

BEGINNING = 1 << 9
"""Bytes of a file that are looked at."""

KINDS = (
    (
        rb"version https://git-lfs\.github\.com/spec/",
        "a pointer of git-lfs, and the file itself isn't here",
        "Fetch it where it was cloned: git lfs pull",
    ),
    (
        rb"(?i)\s*(<!doctype html|<html)",
        "a page of HTML, as a server sends it in place of a file",
        "Download it anew; some servers want a login or another address.",
    ),
)
"""How such files begin, what they are, and what helps."""

RANKS = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n[A-Za-z0-9+/]+=* \d+\r?\n")
"""How a tokenizer of tiktoken begins: tokens in base64 and their ranks."""


def beginning(path: str | Path) -> bytes:
    """The first bytes of a file; none where it can't be read, or is a pipe, read only once."""
    try:
        if not Path(path).is_file():
            return b""
        with open(path, "rb") as file:
            return file.read(BEGINNING)
    except OSError:
        return b""


def refuse_stand_in(path: str | Path) -> None:
    """Raise UsageError for a file that stands for another one."""
    begun = beginning(path)
    for pattern, what, remedy in KINDS:
        if re.match(pattern, begun):
            raise UsageError(f"{path}: {what}", remedy)


def refuse_ranks(path: Path) -> None:
    """Raise UsageError for a tokenizer of tiktoken's own form, and for what stands for a file."""
    refuse_stand_in(path)
    if RANKS.match(beginning(path)):
        raise UsageError(
            f"{path}: a tokenizer as tiktoken has it: tokens in base64, a rank each",
            "Megatron reads none: take the model's tokenizer.json, --tokenizer-type "
            "HuggingFaceTokenizer",
        )


def is_array(begun: bytes) -> bool:
    """Whether a file of JSON is one list, of which each item is a record."""
    return begun.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


class CountedInput(io.RawIOBase):
    """Counts what is read of a file, which may be a pipe."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.count = 0

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read, and count; a pipe that doesn't wait for its writer is waited for."""
        while (count := cast("io.BufferedReader", self.file).readinto(buffer)) is None:
            select.select([self.file], [], [])
        self.count += count
        return count
