"""Finds the lines at which rows of known failures can match, in one search for all rows.

anchors.json has the anchors of each row: texts, one of which is in whatever the row matches. It
is made from the rows by `python3 -m tools.anchors`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from functools import cache
from pathlib import Path
from typing import Any

ANCHORS = Path(__file__).with_name("anchors.json")
MOST_LINES = 64
"""Lines around an anchor's that a row may reach."""


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
    table: dict[str, tuple[list[str], int]] = json.loads(ANCHORS.read_bytes())
    own: dict[str, list[tuple[str, int]]] = {}
    tree: dict[str, Any] = {}
    for name, (anchors, lines) in table.items():
        for anchor in anchors:
            own.setdefault(anchor, []).append((name, lines))
            branch = tree
            for letter in anchor:
                branch = branch.setdefault(letter, {})
            branch[""] = {}
    rows = {
        anchor: [row for end in range(len(anchor) + 1) for row in own.get(anchor[:end], ())]
        for anchor in own
    }
    return re.compile(f"(?=({_expression(tree)}))"), rows


def _expression(tree: dict[str, Any]) -> str:
    """A tree of letters as an expression; where one anchor begins another, the longer matches."""
    branches = [re.escape(letter) + _expression(tree[letter]) for letter in tree if letter]
    branches += [""] * ("" in tree)
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else branches[0]
