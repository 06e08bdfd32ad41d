"""Comments, docstrings and messages of the launcher are in usual words."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

UNUSUAL = re.compile(r"(?i)\b(?:told|tells?|telling|said)\b(?! apart)|\bfound of (?:it|them)\b")
"""Report, state, name, warn, pass, write: readers of this code stumbled over these for them."""

FIELD = re.compile(r"\bsaid: |\{(?:[^{}]|\{[^{}]*\})*\}|`[^`]*`")
"""Code in a text, and the name of a field."""

IN_KEYS = ("stage.py", "compilers.py", "megatron_core_training_example.py")
"""Modules whose every letter is in the images' keys."""

TEXTS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}


def unusual(source: str) -> Iterator[tuple[int, str]]:
    """The lines of a module with an unusual word in a comment, a docstring or a message."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in TEXTS and re.search(r"\s", token.string):
            for offset, line in enumerate(token.string.split("\n")):
                if UNUSUAL.search(FIELD.sub("", line)):
                    yield token.start[0] + offset, line.strip()


@pytest.mark.parametrize(
    "room", sorted(path.name for path in (ROOT / "launcher").iterdir() if path.is_dir())
)
def test_words_are_the_usual_ones(room: str) -> None:
    """Some 500 texts had "told" and "said" for report, state, name, warn, pass and write."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / "launcher" / room).rglob("*.py"))
        if path.name not in IN_KEYS
        for line, text in unusual(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_check_sees_them() -> None:
    assert list(unusual('told = f"{told}"  # `said`\n"it is told"\n')) == [(2, '"it is told"')]
