"""`launcher matrix compat`: which rows work with which releases, tried one after the other."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import names

if TYPE_CHECKING:
    from launcher.trials.result import Result
    from launcher.trials.series import Options

HELP = "build, ask and train in each row with each release, and report what works"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("tags", metavar="TAG", nargs="*", help="rows of the matrix (all tried ones with CUDA)")
    add(
        "--megatron",
        metavar="RELEASE",
        action="append",
        default=[],
        help="not the rows' own; or all",
    )
    add("--source", metavar="PATH", type=Path, help="a Megatron-LM checkout to build")
    add(
        "--base",
        metavar="IMAGE",
        type=names.argument(names.image_for_tag),
        help="in place of the rows' bases: {tag} in it is the tag",
    )
    add(
        "--builder",
        metavar="IMAGE",
        type=names.argument(names.image),
        help="in place of the image that compiles",
    )
    add("--gpus", default="0", metavar="WHICH", help="N, all, device=0,1; without, the CPU")
    add("--no-train", action="store_true", help="build and ask only")
    minutes = partial(add, type=above_zero, metavar="MINUTES")
    minutes("--limit", default=180.0, help="for a cell (180)")
    minutes("--run-limit", default=10.0, help="for a training run (10)")
    add("--disk", type=above_zero, metavar="GB", help="what the images of a cell may take")
    add("--keep", action="store_true", help="leave images in the engine")
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--again", action="store_true", help="try cells that are finished, too")
    again.add_argument("--kept", action="store_true", help="only report all that is finished")
    add("--write", action="store_true", help="into docs/compat.json, which README's table is of")
    add("-o", "--output", metavar="FOLDER", type=Path, default=Path("compat"))


def above_zero(text: str) -> float:
    """A number above zero, and no infinite one."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} isn't a number above 0")


def main(args: argparse.Namespace) -> int:
    """Try the cells and write the reports; 1 where one is worse than expected."""
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


def _options(args: argparse.Namespace) -> Options:
    from launcher.settings import expanded
    from launcher.trials.series import Limits, Options

    disk = None if args.disk is None else round(args.disk * 1e9)
    return Options(
        base=args.base,
        builder=args.builder,
        checkout=expanded(args.source).resolve() if args.source else None,
        gpus=args.gpus,
        train=not args.no_train,
        keep=args.keep,
        limits=Limits(cell=60 * args.limit, run=60 * args.run_limit, disk=disk),
    )
