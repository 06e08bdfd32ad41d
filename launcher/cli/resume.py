"""`launcher resume`: go on with a run from its newest complete checkpoint."""

from __future__ import annotations

import argparse

from launcher.cli.run import options, start_arguments

HELP = "go on with a run from its newest complete checkpoint, on other GPUs if need be"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's id, its beginning, or its name")
    add("--gpus", metavar="WHICH", help="N, all, 0 (the CPU) or device=0,1")
    add("--processes", type=int, metavar="N", help="on the CPU, where --gpus is 0")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set a key of the run file")
    start_arguments(parser)
    parser.set_defaults(backend=None)


def main(args: argparse.Namespace) -> int:
    """Start the run that goes on; the training program's exit code is passed on."""
    from dataclasses import replace

    from launcher.backends import backend
    from launcher.follow.start import resumed, start
    from launcher.follow.supervise import tell
    from launcher.plan.source import parse_set
    from launcher.records import record

    chosen = backend(args.backend or record.find(args.run).backend)
    overrides = [parse_set(argument) for argument in args.set]
    overrides += options(args, "gpus", "processes", "max_restarts")
    asked, notes = resumed(args.run, chosen, overrides)
    for note in notes:
        tell(note)
    asked = replace(asked, tie=args.tie)
    return start(asked, chosen, detach=args.detach, preflight=not args.no_preflight)
