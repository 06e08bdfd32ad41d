"""`launcher exec`: run a command where a run goes on."""

from __future__ import annotations

import argparse

HELP = "run a command where a run goes on: exec RUN -- nvidia-smi"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s RUN -- COMMAND [ARGS ...]"
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Run it; its exit code is passed on."""
    import shlex
    import subprocess
    import sys

    from launcher.errors import UsageError
    from launcher.follow import find

    if args.words:
        raise UsageError(
            f"exec {args.run} {args.words[0]}: the command stands after --",
            f"python3 -m launcher exec {args.run} -- {shlex.join([*args.words, *args.rest])}",
        )
    chosen, job = find.job(args.run)
    if job.ended() is not None:
        raise UsageError(f"run {job.run} has ended", f"See its log: launcher logs {job.run}")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    command = chosen.inside(job, args.rest or ["bash"], terminal=terminal)
    return subprocess.run(command, env=chosen.environment()).returncode
