"""What each series of Megatron does differently from the one before it: series/0.16.json.

A fact begins with a series and holds until one ends it; what it begins with names where that was
read. JSON, since it travels with each run as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_suffix("")


@cache
def _files() -> Mapping[str, Mapping[str, Any]]:
    """The data of each series, the oldest first."""
    found = {path.stem: json.loads(path.read_text("utf-8")) for path in FOLDER.glob("*.json")}
    return {name: found[name] for name in sorted(found, key=numbers)}


def numbers(text: str) -> tuple[int, ...]:
    """The numbers in a version or tag, by which it is compared: (550, 54, 15) of '550.54.15'."""
    return tuple(map(int, re.findall(r"\d{1,9}", text)))


@cache
def _facts() -> Mapping[str, frozenset[str]]:
    """The facts of each series."""
    now, found = frozenset[str](), dict[str, frozenset[str]]()
    for name, said in _files().items():
        now = now - {*said.get("ends", ())} | {*said.get("begins", ())}
        found[name] = now
    return found


def known() -> list[str]:
    """The series that are described, the oldest first."""
    return [*_files()]


def series_of(release: str) -> str:
    """'0.16' of '0.16.1' and '0.16.1+abc': options change between series, hardly within one."""
    return ".".join(release.split(".")[:2])


def is_known(release: str) -> bool:
    """Whether the series of a release is described."""
    return series_of(release) in _files()


def nearest(release: str) -> str:
    """The described series that a release is taken for: its own, or the last before it."""
    before = [name for name in known() if numbers(name) <= numbers(series_of(release))]
    return before[-1] if before else known()[0]


def has(release: str | None, fact: str) -> bool:
    """Whether a fact holds of a release's series, of all for None. Raises KeyError if unknown."""
    since(fact)
    if release is None:
        return all(fact in facts for facts in _facts().values())
    return fact in _facts()[nearest(release)]


def since(fact: str) -> str:
    """The last series that a fact begins with. Raises KeyError where none does."""
    found = [name for name, said in _files().items() if fact in said.get("begins", ())]
    if not found:
        raise KeyError(fact)
    return found[-1]


def removed(release: str) -> dict[str, str]:
    """The options that Megatron's parser takes only to end at, and what replaces each."""
    found = dict[str, str]()
    for name, said in _files().items():
        if numbers(name) <= numbers(nearest(release)):
            found |= said.get("removed", {})
    return found
