"""Writes docs/failures.md from the table of known failures: `python3 -m tools.failures`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from launcher.runs.explain.failures import Failure, table

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
HEAD = """\
# Known failures

For people with a failed run: what failed, by family, and what mends it. The end of a failed run
names a cause of this page. `launcher explain` finds one in any training's log, from a run, a file
or standard input; `--json` is for programs.

```sh
launcher explain slurm-4711.out
```

Of several causes in a log, the first one is reported. A line marked with * counts only where no
other cause is in the log, since ranks also write it when another rank has failed. Here stands what
to do first; `launcher explain` prints the rest, too.
"""
TABLE = "| what failed (since) | what to do first |\n|---|---|\n"


def page() -> str:
    """The whole page."""
    families = groupby(table(), key=lambda known: known.family)
    parts = (f"\n## {name}\n\n{TABLE}{''.join(map(_row, rows))}" for name, rows in families)
    return HEAD + "".join(parts)


def _row(known: Failure) -> str:
    since = "" if known.since == "any" else f" ({known.since})"
    cells = (f"{known.name}{'*' * known.follows}{since}", known.cure.partition("; ")[0])
    return "".join(f"| {cell.replace('|', chr(92) + '|')} " for cell in cells) + "|\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
