"""`launcher plot`: a picture that compares runs."""

from __future__ import annotations

import argparse

HELP = "draw loss and throughput of runs into one PNG"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    about = "a run's id, its beginning, or its name"
    parser.add_argument("runs", metavar="RUN", nargs="+", help=about)
    parser.add_argument(
        "--output", "-o", metavar="FILE", default="plot.png", help="default: %(default)s"
    )


def main(args: argparse.Namespace) -> int:
    """Draw it, and say where it is."""
    from launcher.follow.supervise import tell
    from launcher.records import plot
    from launcher.settings import expanded

    output = expanded(args.output)
    for lacking in plot.plot(args.runs, output):
        tell(lacking)
    print(output)
    return 0
