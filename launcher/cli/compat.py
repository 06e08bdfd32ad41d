"""`launcher matrix compat`: which rows work with which releases, tried one after the other."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.command import (
    BASES,
    BUILDER,
    RELEASES,
    SOURCE,
    above_zero,
    argument,
    command,
    either,
    flag,
)

if TYPE_CHECKING:
    from launcher.trials.result import Result
    from launcher.trials.series import Options

MINUTES = partial(argument, type=above_zero, metavar="MINUTES")


@command(
    argument("tags", "rows of the matrix (all tried ones with CUDA)", "TAG", nargs="*"),
    RELEASES,
    SOURCE,
    BASES,
    BUILDER,
    argument("--gpus", "N, all, device=0,1; without, the CPU", "WHICH", default="0"),
    flag("--no-train", "build and ask only"),
    MINUTES("--limit", "for a cell (180)", default=180.0),
    MINUTES("--run-limit", "for a training run (10)", default=10.0),
    argument("--disk", "what the images of a cell may take", "GB", type=above_zero),
    flag("--keep", "leave images in the engine"),
    either(
        flag("--again", "try cells that are finished, too"),
        flag("--kept", "only report all that is finished"),
    ),
    flag("--write", "into docs/compat.json, which README's table is of"),
    argument("-o --output", "", "FOLDER", type=Path, default=Path("compat")),
)
def compat(args: Namespace) -> int:
    """Build, ask and train in each row with each release, and report what works.

    1 where one is worse than expected.
    """
    import signal

    from launcher.engine.connect import connect
    from launcher.errors import UsageError
    from launcher.matrix.load import load_lock, load_matrix
    from launcher.plan.gpus import parse_gpus
    from launcher.settings import settings
    from launcher.trials import kept, report, series

    matrix = load_matrix()
    if args.kept:
        cells = series.cells(matrix, args.tags or matrix.rows, args.megatron or matrix.releases)
    else:
        cells = series.cells(matrix, args.tags or matrix.usual, args.megatron)
    finished = args.output / "cells"
    parse_gpus(args.gpus)
    if args.write and args.no_train:
        raise UsageError("--write keeps what was trained: leave out --no-train")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    engine = partial(connect, timeout=600)
    options = _options(args)
    tried = series.Series(
        engine, settings(), matrix, load_lock(), options, finished, say, args.again
    )
    results: list[Result] = []
    try:
        for one in tried.kept(cells) if args.kept else tried.run(cells):
            results.append(one)
    finally:  # also where the engine went away, or upon Ctrl-C
        if results:
            _report(results, args.output)
    if not results:
        raise UsageError(f"{finished}: no result of this checkout with these options")
    print(report.as_markdown(results), end="")
    if args.write:
        path = kept.write(results, settings().matrix.parent)
        say(f"{path.name}: written; `make render` puts it into README.md")
    return 1 if any(one.failure for one in results) else 0


def _report(results: Sequence[Result], folder: Path) -> None:
    from launcher import files
    from launcher.trials import html, report

    for name, text in (
        ("report.json", report.as_json(results)),
        ("report.xml", report.as_junit(results)),
        ("report.md", report.as_markdown(results)),
        ("report.html", html.as_html(results)),
    ):
        files.write(folder / name, text)


def _options(args: Namespace) -> Options:
    from launcher.trials.series import Limits, Options

    disk = None if args.disk is None else round(args.disk * 1e9)
    return Options(
        base=args.base,
        builder=args.builder,
        checkout=args.source,
        gpus=args.gpus,
        train=not args.no_train,
        keep=args.keep,
        limits=Limits(cell=60 * args.limit, run=60 * args.run_limit, disk=disk),
    )
