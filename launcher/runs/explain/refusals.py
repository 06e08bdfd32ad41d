"""Finds where Megatron raises a message, in which releases, and for which options.

refusals.json has hashes of each message's fixed words, made from Megatron's source by
`python3 -m tools.refusals`; no text of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

INDEX = Path(__file__).with_name("refusals.json")
WORD = re.compile(r"[A-Za-z_]+")
LONGEST_RUN = 8
"""Words between two values of a message that are compared: a log may break a line after more."""


def key(words: list[str]) -> str:
    """A run's words as the index has them: their number and a hash."""
    return f"{len(words)}{hashlib.sha256(' '.join(words).encode()).hexdigest()[:7]}"


@cache
def _index() -> dict[str, Any]:
    index: dict[str, Any] = json.loads(INDEX.read_bytes())
    by_first: dict[str, list[tuple[list[str], list[Any]]]] = {}
    for parts, place in index["messages"].items():
        first, *others = parts.split(".")
        by_first.setdefault(first, []).append((others, place))
    return {**index, "messages": by_first}


def find(text: str) -> str:
    """Where Megatron raises what a line says, "" where it doesn't, or none of these releases."""
    words = [word.lower() for word in WORD.findall(text)]
    keys = {
        key(words[at : at + length])
        for at in range(len(words))
        for length in range(1, LONGEST_RUN + 1)
        if at + length <= len(words)
    }
    index = _index()
    fits = [
        (len(others), place)
        for each in keys
        for others, place in index["messages"].get(each, ())
        if keys.issuperset(others)
    ]
    if not fits:
        return ""
    first, last, place, options = max(fits, key=lambda fit: fit[0])[1]
    module, _, function = index["places"][place].partition(" ")
    between = dict.fromkeys((index["releases"][first], index["releases"][last]))
    named = ", ".join(f"--{index['options'][one].replace('_', '-')}" for one in options)
    wanted = f", for {named}" if named else ""
    return f"raised by {function} of {module} (Megatron {' to '.join(between)}){wanted}"
