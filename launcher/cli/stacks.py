"""`launcher stacks`: where a run's ranks are, at any time."""

from __future__ import annotations

import argparse

HELP = "say where a run's ranks are, and which one the others wait for"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")


def main(args: argparse.Namespace) -> int:
    """Print the report and keep the stacks; the run itself goes on."""
    from launcher.errors import UsageError
    from launcher.follow import find, watchdog
    from launcher.follow.supervise import tell
    from launcher.records import record

    _, job = find.job(args.run)
    found = job.diagnose()
    if not found:
        raise UsageError(
            f"run {job.run} can't be asked where its ranks are",
            "It has ended, has just been started, or its image was built by an older launcher.",
        )
    print(watchdog.report(found), end="")
    if kept := watchdog.keep(record.folder(job.run), found):
        tell(f"every rank's stack is in {kept}")
    return 0
