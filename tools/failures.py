"""Writes docs/failures.md, and the anchors beside the rows, from the table of known failures.

`python3 -m tools.failures` does it.
"""

from __future__ import annotations

import re
import sys
from itertools import groupby
from pathlib import Path

from launcher.runs.explain.failures import Failure, table
from tools import anchors

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
HEAD = """\
# Known failures

For people with a failed run: the failures that `launcher explain` knows, by family, and what to do
first. The end of a failed run names its cause in the same words.

```sh
launcher explain slurm-4711.out   # any training's log: of a run, a file, or - for standard input
```

If a log has several causes, `explain` reports the first. \\* marks what ranks also write when
another rank has failed: it counts only if the log has no other cause. ? marks a failure with
several causes: `explain` prints the cure of each. Errors that say themselves what is wrong, of
Python, libraries and tools, have no row: `explain` prints their line, and a cure if it knows one.
"""
SAYS_ITSELF = "What an error says itself"
FEWEST, LONG = 4, 9  # words
FURTHER = re.compile(
    r", (?:or|which|where|since|as|so|with|by|in|on|for|than) |(?<![A-Z]): (?!\{)|(?<!and) \("
)
"""Where what comes after the first thing to do begins."""

TABLE = "| what failed (since) | what to do first |\n|---|---|\n"


def page() -> str:
    """The whole page, without the rows of what an error says itself."""
    named = (known for known in table() if known.family != SAYS_ITSELF)
    families = groupby(named, key=lambda known: known.family)
    parts = (f"\n## {name}\n\n{TABLE}{''.join(map(_row, rows))}" for name, rows in families)
    return HEAD + "".join(parts)


def _row(known: Failure) -> str:
    since = "" if known.since == "any" else f" ({known.since})"
    cells = (
        f"{known.name}{'*' * known.follows}{'?' * bool(known.either)}{since}",
        _first(known.cure),
    )
    return "".join(f"| {cell.replace('|', chr(92) + '|')} " for cell in cells) + "|\n"


def _first(cure: str) -> str:
    """What to try first of a cure; of a long one without its alternatives and reasons."""
    clause = cure.partition("; ")[0]
    if len(clause.split()) <= LONG:
        return clause
    heads = (clause[: found.start()] for found in FURTHER.finditer(clause))
    return next(filter(_is_whole, heads), clause)


def _is_whole(head: str) -> bool:
    """Whether a text of a few words leaves no bracket and no code open."""
    pairs = all(head.count(left) == head.count(right) for left, right in ("()", "{}"))
    return pairs and head.count("`") % 2 == 0 and len(head.split()) >= FEWEST


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    anchors.write()
    sys.exit(0)
