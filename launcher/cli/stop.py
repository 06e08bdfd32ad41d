"""`launcher stop`: ask runs to save and end."""

from __future__ import annotations

import argparse

HELP = "ask runs to save a checkpoint and end; remove what is left of ended ones"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="a run's id, its beginning, or its name")
    add("--now", action="store_true", help="end them at once, without saving")
    add(
        "--grace", type=_seconds, metavar="S", help="seconds until it is killed; else the run's own"
    )


def _seconds(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} isn't a number of seconds")
    return int(text)


def main(args: argparse.Namespace) -> int:
    """Stop them one after the other; 0 also where one had ended before."""
    from launcher.errors import UsageError
    from launcher.follow import find
    from launcher.follow.supervise import stop, tell
    from launcher.records import owner, record

    for text in args.runs:
        try:
            _, job = find.job(text)
        except UsageError:
            if not owner.stop_in_pause(record.find(text).run):
                raise
            tell(f"run {text} is between two attempts, and won't be started again")
        else:
            stop(job, now=args.now, grace=args.grace)
    return 0
