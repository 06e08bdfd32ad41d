"""`launcher logs`: what a run has written."""

from __future__ import annotations

import argparse

HELP = "print what a run has written, also after its end"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")


def main(args: argparse.Namespace) -> int:
    """Print it; the run itself is left alone."""
    from launcher.errors import UsageError
    from launcher.run import find, record, watch
    from launcher.run.supervise import write

    try:
        _, job = find.job(args.run)
    except UsageError as error:
        kept = watch.logs(record.folder(record.find(args.run).run))
        if not kept:
            raise error
        for path in kept:
            with path.open("rb") as log:
                while data := log.read(1 << 16):
                    write(data, is_error=False)
        return 0
    for is_error, data in job.output(follow=args.follow):
        write(data, is_error)
    return 0
