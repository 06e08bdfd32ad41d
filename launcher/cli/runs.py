"""`launcher runs`: the runs that there were, whether they go on or not."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.records.runs import Filter, Run

HELP = "list the runs that there were; show one whole; prune their records"
COLUMNS = ("RUN", "NAME", "STATE", "CODE", "ITERATION", "LOSS", "BACKEND", "IMAGE", "CREATED")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    _filters(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--quiet", "-q", action="store_true", help="print the ids alone")
    parser.set_defaults(act=_list)
    below = parser.add_subparsers(metavar="ACTION")
    show = below.add_parser("show", help="all that is kept of one run, as JSON")
    show.add_argument("run", metavar="RUN", help="a run's id, its beginning, or its name")
    show.set_defaults(act=_show)
    prune = below.add_parser("prune", help="remove records; checkpoints and running runs stay")
    _filters(prune)
    prune.add_argument("--older-than", metavar="AGE", help="started longer ago: 30d")
    prune.add_argument("--keep", type=int, default=0, metavar="N", help="but the newest N of them")
    prune.add_argument("--dry-run", action="store_true", help="tell what would be removed")
    prune.set_defaults(act=_prune)


def _filters(parser: argparse.ArgumentParser) -> None:
    states = "running, finished, stopped, failed or unknown (may be repeated)"
    parser.add_argument("--state", action="append", default=[], help=states)
    parser.add_argument("--name", help="runs of this name")
    parser.add_argument("--since", metavar="AGE", help="started no longer ago than 30m, 12h, 7d")


def main(args: argparse.Namespace) -> int:
    """List, show or prune."""
    code: int = args.act(args)
    return code


def _list(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from launcher.cli.ps import table, unheard
    from launcher.follow import find
    from launcher.records import runs

    wanted = _filter(args)
    jobs, silent = find.everywhere()
    found = [run for run in runs.known(job for _, job in jobs) if wanted.takes(run)]
    if args.json:
        print("".join(f"{json.dumps(asdict(run))}\n" for run in found), end="")
    elif args.quiet:
        print("".join(f"{run.run}\n" for run in found), end="")
    else:
        print(table([COLUMNS, *map(_row, found)]), end="")
    return unheard(silent)


def _row(run: Run) -> tuple[str, ...]:
    code = "" if run.code is None else str(run.code)
    iteration = "" if run.iteration is None else str(run.iteration)
    loss = "" if run.loss is None else f"{run.loss:.4g}"
    return (
        run.run,
        run.name,
        run.state,
        code,
        iteration,
        loss,
        run.backend,
        run.image,
        run.created,
    )


def _show(args: argparse.Namespace) -> int:
    import json

    from launcher.records.runs import shown

    print(json.dumps(shown(args.run), indent=1))
    return 0


def _prune(args: argparse.Namespace) -> int:
    from launcher.errors import UsageError
    from launcher.follow import find
    from launcher.records import runs

    if not (args.state or args.name or args.older_than or args.since or args.keep):
        raise UsageError(
            "prune would remove the records of all runs",
            "Say which: --older-than 30d, --keep 20, --state failed, --name NAME.",
        )
    if args.keep < 0:
        raise UsageError(f"--keep {args.keep} is no number of runs")
    freed, known = 0, runs.known(job for _, job in find.jobs())
    for run in runs.to_prune(known, _filter(args), args.keep):
        size = 0 if args.dry_run else runs.prune(run)
        if size is not None:  # else it is about to be started again
            freed += size
            print(f"{run.run}  {run.name}  {run.state}  {run.created}")
    print("nothing was removed" if args.dry_run else f"freed {freed / 1e6:.1f} MB")
    return 0


def _filter(args: argparse.Namespace) -> Filter:
    from launcher.errors import UsageError, nearest
    from launcher.records import runs

    for state in args.state:
        if state not in runs.STATES:
            raise UsageError(f"no state {state!r}", nearest(state, list(runs.STATES)))
    older = getattr(args, "older_than", None)
    return runs.Filter(
        states=tuple(args.state),
        name=args.name,
        since=runs.ago(args.since) if args.since else None,
        before=runs.ago(older) if older else None,
    )
