"""`launcher attach`: follow a run from its first line, with signals and restarts."""

from __future__ import annotations

import argparse

HELP = "follow a run from its first line on, as if it had been started here"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")


def main(args: argparse.Namespace) -> int:
    """Pass its output on; its exit code."""
    from launcher.follow.start import attach

    return attach(args.run)
