"""Commands about runs that were started: listed, followed, asked, ended, drawn."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone, tzinfo
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

from launcher.base.errors import EngineError, LauncherError, UsageError, nearest
from launcher.cli.command import (
    JSON,
    QUIET,
    RUN,
    RUNS,
    SHOWN,
    actions,
    argument,
    call_action,
    command,
    count,
    either,
    flag,
    shown,
    table,
)

if TYPE_CHECKING:
    from launcher.runs.follow.find import SilentBackends
    from launcher.runs.records.recorded_runs import Filter, RunSummary

GOING_ON = ("RUN", "NAME", "STATE", "BACKEND", "GPUS", "IMAGE", "CREATED", "CHECKPOINT")
KEPT = ("RUN", "NAME", "STATE", "CODE", "ITERATION", "LOSS", "BACKEND", "IMAGE", "CREATED")
FILTERS = (
    argument(
        "--state",
        "runs that are running, paused, finished, stopped, failed or unknown (may be repeated)",
        action="append",
        default=[],
    ),
    argument("--name", "runs of this name, or of a pattern: 'gpt2-*'"),
    argument("--since", "runs started in the last 30m, 12h or 7d", "AGE"),
)


@command(either(QUIET, JSON))
def ps(args: Namespace) -> int:
    """List running runs, and runs that ended while no launcher followed them.

    125 where an engine that is there, or was named, couldn't be asked.
    """
    import json

    from launcher.runs.follow import find

    known, silent = find.everywhere()
    if args.json:
        heads = [head.lower() for head in GOING_ON]
        rows = (dict(zip(heads, row, strict=True)) for row in find.rows(known))
        print("".join(f"{json.dumps(row)}\n" for row in rows), end="")
    elif args.quiet:
        print("".join(f"{job.run}\n" for _, job in known), end="")
    else:
        print(table([GOING_ON, *find.rows(known)]), end="")
    return _tell_silent(silent)


def _tell_silent(silent: list[SilentBackends]) -> int:
    """Print who couldn't be asked, and why; the exit code, 0 where there was nobody to ask."""
    from launcher.runs.follow.live import tell

    asked = [one for one in silent if one.may_have_jobs]
    for one in asked:
        tell(str(one))
    return EngineError.exit_code if asked else 0


@command(RUN, SHOWN)
def attach(args: Namespace) -> int:
    """Follow a run from its first line; Ctrl-C stops the run."""
    from launcher.runs.follow.launch import attach

    return attach(args.run, shown(args))


def _pieces(log: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: log.read(1 << 20), b"")


@command(
    RUN,
    flag("--follow -f", "follow the output until the run ends"),
    argument("--tail", "only the last N lines; with -f, also new lines", "N", type=count),
    argument("--since", 'only lines of the last 10m or 2h, or since "2026-05-01 12:30"', "T"),
)
def logs(args: Namespace) -> int:
    """Print a run's output, also after its end.

    A line without a time has that of the last one before it, or of the run's start.
    """
    from launcher.api import Run
    from launcher.runs.follow import lines
    from launcher.runs.follow.live import write

    run = Run(args.run)
    zone, created = _times(args.run)
    start = lines.parse_since(args.since, zone) if args.since else None

    def chosen(follow: bool) -> Iterator[tuple[bool, bytes]]:
        found = lines.lines(run.output(follow=follow))
        return lines.since(found, start, begun=created >= start) if start else found

    if args.tail is None:
        found = chosen(args.follow) if start else run.output(follow=args.follow)
    elif args.follow:
        found = islice(chosen(True), max(0, sum(1 for _ in chosen(False)) - args.tail), None)
    else:
        found = lines.last(chosen(False), args.tail)
    for is_error, data in found:
        write(data, is_error)
    return 0


def _times(run: str) -> tuple[tzinfo | None, datetime]:
    """The time zone of a run's log, None for this machine's, and when the run was started in it."""
    from launcher.runs.backends import backend
    from launcher.runs.records import record

    with suppress(LauncherError):
        kept = record.find(run)
        zone = timezone.utc if backend(kept.backend).contained else None
        return zone, datetime.fromisoformat(kept.created).astimezone(zone).replace(tzinfo=None)
    return timezone.utc, datetime.min


@command(
    argument("log", "a run, a file with any training's log, or - for standard input", "RUN|FILE|-"),
    flag("--json", "print one JSON object"),
)
def explain(args: Namespace) -> int:
    """Find why a run failed and how to fix it, from its log or any other log.

    The exit code is 1 if no known cause is in it.
    """
    import json

    from launcher.api import Run
    from launcher.base.settings import expanded
    from launcher.runs.explain import failures
    from launcher.runs.records import recorded_runs

    how = ""
    if args.log == "-":
        explained = failures.explain(_pieces(sys.stdin.buffer))
    elif (path := expanded(args.log)).is_file():
        with path.open("rb") as log:
            explained = failures.explain(_pieces(log))
    else:
        explained = Run(args.log).explain()
        how = recorded_runs.outcome(args.log)
    lines = explained.lines
    if how in ("finished", "stopped") and not (explained.signs or explained.suspects):
        lines = [f"run {args.log} {how}: it didn't fail"]
    print(json.dumps(explained.as_json(), indent=1) if args.json else "\n".join(lines))
    return 0 if any(not sign.failure.located for sign in explained.signs[:1]) else 1


@command(RUN)
def stacks(args: Namespace) -> int:
    """Show where each rank of a run is, and which rank the others wait for."""
    from launcher.runs.follow import find, watchdog
    from launcher.runs.follow.live import tell
    from launcher.runs.records import record

    _, job = find.job(args.run)
    found = job.diagnose()
    if not found:
        raise UsageError(
            f"run {job.run} can't be asked where its ranks are",
            "It has ended, has just been started, or its image was built by an older launcher.",
        )
    print(watchdog.report(found), end="")
    if kept := watchdog.write_report(record.folder(job.run), found):
        tell(f"every rank's stack is in {kept}")
    return 0


@command(
    RUNS,
    flag("--now", "end them at once, without saving"),
    argument("--grace", "seconds until the run is killed", "S", type=count),
)
def stop(args: Namespace) -> int:
    """Ask runs to save a checkpoint and end; remove ended runs from `ps`."""
    from launcher.api import Run
    from launcher.runs.follow import find

    for text in find.named(args.runs):
        Run(text).stop(now=args.now, grace=args.grace)
    return 0


@command(
    RUN,
    argument("words", argparse.SUPPRESS, nargs="*"),
    usage="%(prog)s RUN -- COMMAND [ARGS ...]",
)
def exec(args: Namespace) -> int:
    """Run a command in a run's container: exec RUN -- nvidia-smi."""
    import shlex
    import subprocess

    from launcher.runs.follow import find

    if args.words:
        raise UsageError(
            f"exec {args.run} {args.words[0]}: the command must follow --",
            f"launcher exec {args.run} -- {shlex.join([*args.words, *args.rest])}",
        )
    chosen, job = find.job(args.run)
    if job.ended() is not None:
        raise UsageError(f"run {job.run} has ended", f"See its log: launcher logs {job.run}")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    words = chosen.inside(job, args.rest or ["bash"], terminal=terminal)
    return subprocess.run(words, env=chosen.environment()).returncode


@command(RUNS, argument("--output -o", "default: %(default)s", "FILE", default="plot.png"))
def plot(args: Namespace) -> int:
    """Draw loss and throughput of runs into one PNG."""
    from launcher.base.settings import expanded
    from launcher.runs.follow.live import tell
    from launcher.runs.records import plot

    output = expanded(args.output)
    for lacking in plot.plot(args.runs, output):
        tell(lacking)
    print(output)
    return 0


@command(RUN)
def show(args: Namespace) -> int:
    """Print the record of a run as JSON."""
    import json

    from launcher.runs.records.recorded_runs import shown
    from launcher.tools.forecast import receipt

    kept = shown(args.run)
    found = receipt.of_run(kept["run"])
    print(json.dumps(kept | {"receipt": found and receipt.as_json(found)}, indent=1))
    return 0


@command(RUN, flag("--json", "print one JSON object"))
def receipt(args: Namespace) -> int:
    """Compare a run with its forecast: step, memory, hours; show where the time went."""
    import json

    from launcher.runs.records import record
    from launcher.tools.forecast import receipt

    run = record.find(args.run).run
    if (found := receipt.of_run(run)) is None:
        raise UsageError(f"run {run} has no two lines of training", "See logging.log_interval.")
    said = json.dumps(receipt.as_json(found), indent=1) if args.json else None
    print(said or "\n".join(receipt.lines(found)))
    return 0


@command(
    *FILTERS,
    argument("--older-than", "runs started longer ago than this: 30d", "AGE"),
    argument("--keep", "keep the newest N", "N", type=int, default=0),
    flag("--dry-run", "print what would be removed"),
)
def prune(args: Namespace) -> int:
    """Remove records of runs and bisects, but no checkpoint and no running run."""
    from launcher.base.names import LABEL
    from launcher.base.settings import settings
    from launcher.runs import payload
    from launcher.runs.follow import find
    from launcher.runs.records import record as records
    from launcher.runs.records import recorded_runs

    if not (args.state or args.name or args.older_than or args.since or args.keep):
        raise UsageError(
            "prune would remove the records of all runs",
            "Say which: --older-than 30d, --keep 20, --state failed, --name NAME.",
        )
    if args.keep < 0:
        raise UsageError(f"--keep {args.keep} is no number of runs")
    jobs, silent = find.everywhere()
    freed, known = 0, recorded_runs.known(job for _, job in jobs)
    with suppress(ModuleNotFoundError):  # the tool may be deleted
        from launcher.tools.bisect import kept

        known += kept.summaries()
    known.sort(key=lambda run: run.created, reverse=True)
    for run in recorded_runs.to_prune(known, _filter(args), args.keep):
        size = 0 if args.dry_run else recorded_runs.prune(run)
        if size is not None:  # else it is about to be started again
            freed += size
            print(f"{run.run}  {run.name}  {run.state}  {run.created}")
    unseen = any(one.may_have_jobs for one in silent)  # a payload may be that of such a run
    if not (args.dry_run or unseen):
        used = {job.labels.get(LABEL + payload.KEY, "") for _, job in jobs}
        used |= {record.payload for record in records.each()}
        freed += payload.sweep(settings().runs, used)
    print("nothing was removed" if args.dry_run else f"freed {freed / 1e6:.1f} MB")
    return 0


@command(
    *FILTERS,
    either(QUIET, JSON),
    argument("--html", "write a page for a browser: the runs and their curves", "FILE"),
    actions(show, receipt, prune, required=False),
)
def runs(args: Namespace) -> int:
    """List recorded runs; show or remove records."""
    import json
    from dataclasses import asdict

    from launcher.runs.follow import find
    from launcher.runs.follow.live import tell
    from launcher.runs.records.recorded_runs import UNKNOWN, known

    if args.action:
        return call_action(args)
    wanted = _filter(args)
    if args.html:
        return _write_page(args.html, wanted)
    jobs, silent = find.everywhere()
    found = [run for run in known(job for _, job in jobs) if wanted.takes(run)]
    if args.json:
        print("".join(f"{json.dumps(asdict(run))}\n" for run in found), end="")
    elif args.quiet:
        print("".join(f"{run.run}\n" for run in found), end="")
    else:
        print(table([KEPT, *map(_row, found)]), end="")
        unseen = {run.run for run in found if run.state == UNKNOWN} & {job.run for _, job in jobs}
        for run in sorted(unseen):
            tell(f"run {run} ended while no launcher followed it; see: launcher attach {run}")
    return _tell_silent(silent)


def _write_page(name: str, wanted: Filter) -> int:
    import gc

    from launcher.base.settings import expanded
    from launcher.tools.board import board

    gc.disable()  # the curves of thousands of runs are no garbage, and each is looked at
    board.write(path := expanded(name), wanted)
    print(path)
    return 0


@command(argument("--port", "the port on 127.0.0.1; 0: any free port", "N", type=int, default=0))
def board(args: Namespace) -> int:
    """Serve a page of all runs and their curves, until Ctrl-C."""
    from launcher.tools.board import server

    server.serve(args.port, lambda address: print(address, flush=True))
    return 0


def _row(run: RunSummary) -> tuple[str, ...]:
    code = "" if run.code is None else str(run.code)
    at = "" if run.iteration is None else str(run.iteration)
    loss = "" if run.loss is None else f"{run.loss:.4g}"
    return (run.run, run.name, run.state, code, at, loss, run.backend, run.image, run.created)


def _filter(args: Namespace) -> Filter:
    from launcher.runs.records import recorded_runs

    for state in args.state:
        if state not in recorded_runs.STATES:
            raise UsageError(f"no state {state!r}", nearest(state, list(recorded_runs.STATES)))
    older = getattr(args, "older_than", None)
    return recorded_runs.Filter(
        states=tuple(args.state),
        name=args.name,
        since=recorded_runs.ago(args.since) if args.since else None,
        before=recorded_runs.ago(older) if older else None,
    )
