"""Recognises files that are not what they were given for, by how they begin."""

from __future__ import annotations

import re
from pathlib import Path

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
