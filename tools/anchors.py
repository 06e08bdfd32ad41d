"""The anchors of known failures, which `python3 -m tools.failures` writes.

An anchor is a text that stands in whatever an expression matches. They are read from the parsed
expressions of launcher/runs/explain/known/; launcher/runs/explain/anchors.json is written anew.
"""

from __future__ import annotations

import json
import re
from itertools import product
from re import _constants as code  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from launcher.runs.explain.anchors import ANCHORS, MOST_LINES
from launcher.runs.explain.failures import table

MOST_TEXTS = 16
"""Ways in which a part of an expression may be written, and still be one of an anchor."""

COMMON = ("NCCL WARN ", "Error: ", "RuntimeError: ", "error: ", "Warning")
"""Texts of many other lines, that are no anchors where there is another."""

REPEATS = tuple(
    getattr(code, name)
    for name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")
    if hasattr(code, name)
)
ZERO_WIDTH = (code.AT, code.ASSERT, code.ASSERT_NOT)


def anchors(says: tuple[str, ...]) -> tuple[list[str], int]:
    """Anchors of a row, each match has one of them; and the lines around it that a match reaches.

    ValueError: an expression has none.
    """
    found, lines = set[str](), 0
    for expression in says:
        parsed = parser.parse(expression, re.MULTILINE)
        texts = _required(parsed)
        if not texts:
            raise ValueError(f"no text is in all that this matches: {expression}")
        found, lines = found | texts, max(lines, _newlines(parsed))
    apart = sorted(text for text in found if not any(one in text for one in found - {text}))
    return apart, min(lines, MOST_LINES)


def _required(parsed: Any) -> set[str]:
    """The best set of texts of which each match has one, empty where there is none."""
    sets, run = list[set[str]](), {""}
    for node in parsed:
        texts = _texts(node)
        joined = {a + b for a, b in product(run, texts)} if texts else set[str]()
        if texts and len(joined) <= MOST_TEXTS:
            run = joined
            continue
        sets, run = [*sets, run], texts or {""}
        sets.append(_inside(node))
    return max([*sets, run], key=lambda one: (min(map(_weight, one), default=0), -len(one)))


def _weight(text: str) -> int:
    return min(len(text), 1) if text in COMMON else len(text)


def _inside(node: Any) -> set[str]:
    operation, value = node
    if operation is code.SUBPATTERN:
        return set() if value[1] & re.IGNORECASE else _required(value[3])
    if operation is code.BRANCH:
        sets = [_required(one) for one in value[1]]
        return set[str]().union(*sets) if all(all(one) and one for one in sets) else set()
    if operation in REPEATS and value[0]:
        return _required(value[2])
    return set()


def _texts(node: Any) -> set[str]:
    """All that a part matches, empty where that is much or unknown."""
    operation, value = node
    if operation in ZERO_WIDTH:
        return {""}
    if operation is code.LITERAL:
        return {chr(value)}
    if operation is code.IN and all(one is code.LITERAL for one, _ in value):
        return {chr(letter) for _, letter in value}
    if operation is code.SUBPATTERN and not value[1]:
        return _all_texts(value[3])
    if operation is code.BRANCH:
        sets = [_all_texts(one) for one in value[1]]
        return set[str]().union(*sets) if all(sets) else set()
    if operation in REPEATS and value[:2] == (0, 1):
        texts = _all_texts(value[2])
        return {"", *texts} if texts else set()
    return set()


def _all_texts(parsed: Any) -> set[str]:
    texts = {""}
    for node in parsed:
        texts = {a + b for a, b in product(texts, _texts(node))}
        if len(texts) > MOST_TEXTS:
            return set()
    return texts


def _newlines(parsed: Any, dotall: bool = False) -> int:
    """The line ends that a match reaches over; a class of spaces counts as one."""
    count = 0
    for operation, value in parsed:
        if operation is code.ANY:
            count += dotall
        elif operation is code.LITERAL:
            count += value == ord("\n")
        elif operation is code.IN:
            space = (code.CATEGORY, code.CATEGORY_SPACE)
            count += space in value or (code.LITERAL, ord("\n")) in value
        elif operation is code.SUBPATTERN:
            count += _newlines(value[3], dotall or bool(value[1] & re.DOTALL))
        elif operation in (code.ASSERT, code.ASSERT_NOT):
            count += _newlines(value[1], dotall)
        elif operation is code.BRANCH:
            count += max(_newlines(one, dotall) for one in value[1])
        elif operation in REPEATS:
            inside = _newlines(value[2], dotall)
            spaces = value[2][0][0] is code.IN
            count += inside if spaces else min(inside * int(value[1]), MOST_LINES)
    return count


def index() -> dict[str, Any]:
    """What the file holds: an expression of all anchors, and the rows of each with their lines.

    A longer anchor has the rows of those that begin it, too.
    """
    own: dict[str, list[tuple[str, int]]] = {}
    tree: dict[str, Any] = {}
    for known in table():
        texts, lines = anchors(known.says)
        for text in texts:
            own.setdefault(text, []).append((known.name, lines))
            branch = tree
            for letter in text:
                branch = branch.setdefault(letter, {})
            branch[""] = {}
    rows = {
        text: [row for end in range(len(text) + 1) for row in own.get(text[:end], ())]
        for text in own
    }
    return {"expression": f"(?=({_expression(tree)}))", "rows": rows}


def _expression(tree: dict[str, Any]) -> str:
    """A tree of letters as an expression; where one anchor begins another, the longer matches."""
    branches = [re.escape(letter) + _expression(tree[letter]) for letter in tree if letter]
    branches += [""] * ("" in tree)
    return f"(?:{'|'.join(branches)})" if len(branches) > 1 else branches[0]


def write() -> None:
    """Write the file beside the rows."""
    ANCHORS.write_text(json.dumps(index(), indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
