"""Writes facts into matrix.yaml as a person would: keys added to a row, every other byte kept."""

from __future__ import annotations

import re
from collections.abc import Mapping

from launcher.errors import UsageError
from launcher.matrix.schema import Row

ORDER = tuple(Row.model_fields)
"""The order in which a row's keys stand."""


def into(text: str, tag: str, facts: Mapping[str, str]) -> str:
    """`text`, a matrix, with `facts` added to the row `tag`, none of which it has a key for yet.

    Raises UsageError where the row isn't written as block of lines, as all of ours are.
    """
    lines = text.splitlines(keepends=True)
    start = _line_of_row(lines, tag)
    end = start + 1
    while end < len(lines) and re.match(r"    \S", lines[end]):
        end += 1
    row = lines[start + 1 : end]
    for key in sorted(facts, key=ORDER.index):
        row.insert(_place(row, key), f'    {key}: "{facts[key]}"\n')
    return "".join([*lines[: start + 1], *row, *lines[end:]])


def _line_of_row(lines: list[str], tag: str) -> int:
    below = next((n for n, line in enumerate(lines) if line.startswith("rows:")), len(lines))
    for number, line in enumerate(lines[below:], below):
        if re.fullmatch(rf"  [\"']?{re.escape(tag)}[\"']?:\s*", line):
            return number
    raise UsageError(
        f"matrix.yaml: the row {tag} isn't written as a block of lines",
        "Write its facts there by hand: `image probe TAG --json` prints them.",
    )


def _place(row: list[str], key: str) -> int:
    """Behind the last line whose key stands before `key`."""
    before = {name for name in ORDER if ORDER.index(name) < ORDER.index(key)}
    return max(
        (n + 1 for n, line in enumerate(row) if line.split(":")[0].strip() in before), default=0
    )
