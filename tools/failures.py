"""Writes docs/failures.md from the table of known failures: `python3 -m tools.failures`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from launcher.runs.records.failures import Failure, table

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
HEAD = """\
# Known failures

For people with a failed run: what failed, and what mends it. The end of a failed run names a cause
of this page, and `launcher explain RUN|FILE` looks for one in any training's log.

```sh
launcher explain slurm-4711.out
```

*before the start* is the check that prevents the failure; `diagnosed` means that only the log shows
it. *since* is the first release that writes the message; empty means all. Of several causes in a
log the first one is reported. The failures of the second table count last, since ranks also write
them when another rank has failed.

"""
TABLE = (
    "| what failed | what mends it | before the start | since | seen in |\n|---|---|---|---|---|\n"
)
FOLLOWS = "\n## What may follow from another failure\n\n"
REPORT = re.compile(r"\b([\w.-]+/[\w.-]+)#(\d+)")


def page() -> str:
    """The whole page."""
    first = "".join(_row(known) for known in table() if not known.follows)
    after = "".join(_row(known) for known in table() if known.follows)
    return f"{HEAD}{TABLE}{first}{FOLLOWS}{TABLE}{after}"


def _row(known: Failure) -> str:
    before = f"prevented: {known.prevented}" if known.prevented else "diagnosed"
    source = REPORT.sub(r"[\1#\2](https://github.com/\1/issues/\2)", known.source)
    since = "" if known.since == "any" else known.since
    cells = (known.name, known.cure, before, since, source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.exit(0)
