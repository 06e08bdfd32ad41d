"""Finds the lines at which rows of known failures can match, in one search for all rows.

anchors.json has the anchors of each row: texts, one of which is in whatever the row matches. It
is made from the rows by `python3 -m tools.failures`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import Any

ANCHORS = Path(__file__).with_name("anchors.json")
MOST_LINES = 64  # lines around an anchor's that a row may reach


def find(text: str, starts: list[int]) -> dict[str, list[tuple[int, int]]]:
    """The parts of a text that a row can match in, as its lines' first and last, by the row's name.

    starts: where each line begins, and where one after the last would.
    """
    search, rows = _search()
    found: dict[str, list[tuple[int, int]]] = {}
    for match in search.finditer(text):
        line = bisect_right(starts, match.start()) - 1
        for name, lines in rows[match[1]]:
            first, last = max(0, line - lines), min(line + lines, len(starts) - 2)
            parts = found.setdefault(name, [])
            if parts and first <= parts[-1][1]:
                parts[-1] = (parts[-1][0], last)
            else:
                parts.append((first, last))
    return found


@cache
def _search() -> tuple[re.Pattern[str], dict[str, list[tuple[str, int]]]]:
    """An expression of all anchors, and the rows of each with the lines that they reach."""
    index: dict[str, Any] = json.loads(ANCHORS.read_bytes())
    return re.compile(index["expression"]), index["rows"]
