"""`launcher logs`: what a run has written."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "print what a run has written, also after its end"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")
    parser.add_argument("--follow", "-f", action="store_true", help="go on until the run ends")


def main(args: argparse.Namespace) -> int:
    """Print it; the run itself is left alone."""
    from launcher.errors import EngineError, LauncherError
    from launcher.follow import find
    from launcher.follow.supervise import tell, write

    try:
        _, job = find.job(args.run)
    except LauncherError as error:
        kept = _kept(args.run)
        if not kept:
            raise
        if isinstance(error, EngineError):
            tell("an engine doesn't answer; this is what was kept until now")
        for path in kept:
            with path.open("rb") as log:
                while data := log.read(1 << 16):
                    write(data, is_error=False)
        return 0
    for is_error, data in job.output(follow=args.follow):
        write(data, is_error)
    return 0


def _kept(text: str) -> list[Path]:
    """The logs beside the record of the run that `text` names, if there is one."""
    from launcher.errors import UsageError
    from launcher.records import record, watch

    try:
        return watch.logs(record.folder(record.find(text).run))
    except UsageError:
        return []
