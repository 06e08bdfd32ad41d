"""`launcher ps`: the runs that go on, or ended and were not yet looked at."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from launcher.errors import EngineError
from launcher.screen import printable

if TYPE_CHECKING:
    from launcher.follow.find import Silent

HELP = "list the runs that go on, or have ended with nobody watching"
COLUMNS = ("RUN", "NAME", "STATE", "BACKEND", "GPUS", "IMAGE", "CREATED", "CHECKPOINT")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--quiet", "-q", action="store_true", help="print the ids alone")


def main(args: argparse.Namespace) -> int:
    """Print a table; 125 where an engine that is there, or was named, couldn't be asked."""
    from launcher.follow import find

    known, silent = find.everywhere()
    if args.quiet:
        print("".join(f"{job.run}\n" for _, job in known), end="")
    else:
        print(table([COLUMNS, *find.rows(known)]), end="")
    return unheard(silent)


def unheard(silent: list[Silent]) -> int:
    """Tell who couldn't be asked, and why; the exit code, 0 where there was nobody to ask."""
    from launcher.follow.supervise import tell

    for one in silent:
        tell(str(one) if one.may_have_jobs else str(one).partition(";")[0])
    return EngineError.exit_code if any(one.may_have_jobs for one in silent) else 0


def table(rows: list[tuple[str, ...]]) -> str:
    """The rows in columns that are as wide as their widest cell; a cell is one line."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]  # noqa: B905 - all are as long
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
