"""Writes docs/failures.md from the table of known failures: `python3 -m tools.failures`."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from launcher.runs.records.failures import Failure, table

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
HEAD = """\
# Known failures

For people with a failed run: what failed, and what mends it. The end of a failed run names a cause
of this page. `launcher explain LOG` looks for one in the log of any training, from a file, a run or
standard input; `--json` is for programs.

```sh
launcher explain slurm-4711.out
```

Of several in a log, the first reason is the cause. A line marked with * is one only where no reason
is in the log: ranks write it as well when another one has failed. What is in italics keeps it from
a run of the launcher, or tells of it before the start.
"""


def page() -> str:
    """The whole page."""
    families = groupby(table(), key=lambda known: known.family)
    parts = (f"\n## {name}\n\n{''.join(map(_row, rows))}" for name, rows in families)
    return HEAD + "".join(parts)


def _row(known: Failure) -> str:
    since = "" if known.since == "any" else f" ({known.since})"
    before = f" (*{known.prevented}*)" if known.prevented else ""
    return f"- **{known.name}**{'*' * known.follows}{since}: {known.cure}{before}\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
