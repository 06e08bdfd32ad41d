"""`launcher ps`: the runs that go on, or ended and were not yet looked at."""

from __future__ import annotations

import argparse

HELP = "list the runs that go on, or have ended with nobody watching"
COLUMNS = ("RUN", "NAME", "STATE", "BACKEND", "GPUS", "IMAGE", "CREATED", "CHECKPOINT")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--quiet", "-q", action="store_true", help="print the ids alone")


def main(args: argparse.Namespace) -> int:
    """Print a table."""
    from launcher.run import find
    from launcher.run.supervise import tell

    known, silent = find.everywhere()
    for reason in silent:
        tell(reason.splitlines()[0].rstrip(";").removesuffix("; tried:"))
    found = [job for _, job in known]
    if args.quiet:
        print("".join(f"{job.run}\n" for job in found), end="")
        return 0
    rows = [COLUMNS, *(find.row(job) for job in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip())  # noqa: B905
    return 0
