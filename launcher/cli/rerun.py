"""`launcher rerun`: repeat a run exactly, or say what is no longer the same."""

from __future__ import annotations

import argparse

from launcher.cli.run import follow_arguments

HELP = "repeat a run exactly, or say what is no longer the same"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's id, its beginning, or its name")
    add("--force", action="store_true", help="run it even where something isn't the same")
    follow_arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Start the run again from its beginning; the training program's exit code is passed on."""
    from dataclasses import replace

    from launcher.backends import backend
    from launcher.follow.start import repeated, start
    from launcher.follow.supervise import tell
    from launcher.records import record

    chosen = backend(record.find(args.run).backend)
    asked, notes = repeated(args.run, chosen, force=args.force)
    for note in notes:
        tell(note)
    asked = replace(asked, tie=args.tie)
    return start(asked, chosen, detach=args.detach, preflight=not args.no_preflight)
