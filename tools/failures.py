"""Writes docs/failures.md from the table of known failures: `python3 -m tools.failures`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from launcher.runs.records.failures import Failure, table

PAGE = Path(__file__).parents[1] / "docs" / "failures.md"
HEAD = """\
# Known failures

What `launcher explain` names in a log, and what stands at the end of a failed run. It is made of
`launcher/runs/records/failures.yaml` by `python3 -m tools.failures`; each of its expressions has a
text that was really written, in `tests/runs/records/said.yaml`. *Before the start* is what prevents
it or tells of it first; where it says `diagnosed`, the log alone does. Of several causes in a log
the first to be said is told, but for those of the second table, which ranks write as well when
another one has failed. *since* is the first release that writes it, as the sources tell; where it
is empty, all do that the matrix has.

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
