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
    print(table([COLUMNS, *(find.row(job) for job in found)]), end="")
    return 0


def table(rows: list[tuple[str, ...]]) -> str:
    """The rows in columns that are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows)]  # noqa: B905 - all are as long
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
