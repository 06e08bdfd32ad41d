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

For people with a failed run: the failures that `launcher explain` knows, by topic, and the first
step against each. When a run fails, its last lines name the failure and the cure, too.

```sh
launcher explain slurm-4711.out   # the log of any training: a run, a file, or - for standard input
```

If a log has several failures, `explain` reports the first one that isn't marked \\* below. The
tables leave out errors whose own message says what is wrong. For such an error, `explain` prints
its line, and a cure if it knows one.

- \\*: often only a consequence. A rank writes this also after another rank has failed, so `explain`
  reports it as the cause only if the log has no other failure.
- In brackets: the first release that writes this message.
- A list below a table: each of these failures can have several causes. `explain` prints a cure for
  each cause.
"""
SAYS_ITSELF = "What an error says itself"
TABLE = "| failure | first step |\n|---|---|\n"
OPEN, CLOSE = "<!-- failures: made by tools/failures.py -->\n", "<!-- /failures -->\n"
FIELD = re.compile(r":? ?\{\w+\}")
"""A field of a name, which a log's words fill: ": {header}"."""


def page() -> str:
    """The whole page, without the rows of what an error says itself."""
    named = (known for known in table() if known.topic != SAYS_ITSELF)
    topics = groupby(named, key=lambda known: known.topic)
    parts = (f"\n## {name}\n\n{_topic(list(rows))}" for name, rows in topics)
    return f"{HEAD}\n{OPEN}{''.join(parts)}\n{CLOSE}"


def _topic(rows: list[Failure]) -> str:
    """The table of a topic's failures with one cause each, and the list of the others."""
    cells = ([_name(known), first_step(known)] for known in rows if not known.either)
    lines = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)
    several = (f"- {_name(known)}" for known in rows if known.either)
    parts = ("\n".join(part) for part in ([TABLE + "\n".join(lines)], [*several]) if part)
    return "\n\n".join(parts) + "\n"


def _name(known: Failure) -> str:
    since = "" if known.since == "any" else f" ({known.since})"
    return f"{FIELD.sub('', known.name)}{'*' * known.follows}{since}"


def first_step(known: Failure) -> str:
    """What to try first of a cure: what it has before its first semicolon."""
    return known.cure.partition("; ")[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    anchors.write()
    sys.exit(0)
