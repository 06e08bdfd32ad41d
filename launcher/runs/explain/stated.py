"""Fills a row's texts with what an error's own words, and the traceback before it, name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from launcher.runs.explain.loglines import LINES, Words

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
    frame = last_frame(before)
    owner = PACKAGE.search(frame[1]) if frame else None
    place = f"{frame[3]} of {'/'.join(frame[1].split('/')[-3:])}, line {frame[2]}" if frame else ""
    is_python = module in sys.stdlib_module_names
    return {
        "package": "Python" if is_python else LINES["packages"].get(module, module),
        "caller": owner[1] or owner[2] if owner else PROGRAM,
        "place": place or PROGRAM,
        **found,
    }


def last_frame(before: Iterable[Words], frame: re.Pattern[str] = FRAME) -> re.Match[str] | None:
    """The last line of a traceback that names a file and a function; None where none does."""
    return next(filter(None, (frame.search(line.text) for line in reversed([*before]))), None)
