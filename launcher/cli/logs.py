"""`launcher logs`: what a run has written."""

from __future__ import annotations

import argparse

HELP = "print what a run has written"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")


def main(args: argparse.Namespace) -> int:
    """Print it; the run itself is left alone."""
    from launcher.run import find
    from launcher.run.supervise import write

    _, job = find.job(args.run)
    for is_error, data in job.output(follow=args.follow):
        write(data, is_error)
    return 0
