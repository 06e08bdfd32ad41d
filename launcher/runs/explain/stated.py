"""Fills a row's texts with what an error's own words, and the traceback before it, name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import yaml

from launcher.base.yamlfile import Loader
from launcher.runs.explain.loglines import Words

FILE = Path(__file__).with_name("packages.yaml")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
PACKAGE = re.compile(r"(?:site|dist)-packages/(\w+)|/(megatron|nemo|verl|swift|slime|torchtitan)/")
HOLE = re.compile(r"\{(\w+)\}")
PROGRAM = "the program"


def fill(text: str, found: dict[str, str]) -> str:
    """A text with the words that were found in place of its {holes}; others stay as they are."""
    return HOLE.sub(lambda hole: found.get(hole[1], hole[0]), text)


def values(match: re.Match[str], before: Iterable[Words]) -> dict[str, str]:
    """What a match's groups name; {} where its expression has none.

    package: what pip calls its module. caller and place: the package and the function whose line
    raised it, by the traceback before it.
    """
    if not match.re.groupindex:
        return {}
    found = {name.rstrip("_"): value for name, value in match.groupdict().items() if value}
    module = found.get("module", "").partition(".")[0]
    frame = next(filter(None, (FRAME.search(line.text) for line in reversed([*before]))), None)
    owner = PACKAGE.search(frame[1]) if frame else None
    place = f"{frame[3]} of {'/'.join(frame[1].split('/')[-3:])}, line {frame[2]}" if frame else ""
    return {
        "package": "Python"
        if module in sys.stdlib_module_names
        else _packages().get(module, module),
        "caller": owner[1] or owner[2] if owner else PROGRAM,
        "place": place or PROGRAM,
        **found,
    }


@cache
def _packages() -> dict[str, str]:
    """What pip calls the package of a module that has another name."""
    names: dict[str, str] = yaml.load(FILE.read_bytes(), Loader)  # noqa: S506
    return names
