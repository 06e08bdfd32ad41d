"""`launcher exec`: run a command where a run goes on."""

from __future__ import annotations

import argparse

HELP = "run a command where a run goes on: exec RUN -- nvidia-smi"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.usage = "%(prog)s RUN -- COMMAND [ARGS ...]"
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")


def main(args: argparse.Namespace) -> int:
    """Run it; its exit code is passed on."""
    import subprocess
    import sys

    from launcher.errors import UsageError
    from launcher.run import find

    chosen, job = find.job(args.run)
    if job.ended() is not None:
        raise UsageError(f"run {job.run} has ended", f"See its log: launcher logs {job.run}")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    command = chosen.inside(job, args.rest or ["bash"], terminal=terminal)
    return subprocess.run(command, env=chosen.environment()).returncode
