"""`launcher matrix`: list, render and lock what can be built; try it, here or in CI."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.base.screen import Progress
from launcher.cli.command import (
    BASES,
    BUILDER,
    RELEASES,
    SOURCE,
    above_zero,
    actions,
    argument,
    call_action,
    command,
    either,
    flag,
)

if TYPE_CHECKING:
    from launcher.tools.trials.result import CellResult
    from launcher.tools.trials.sweep import TrialOptions


@command(
    either(
        flag("--keys", "also the key of each row's image with each release"),
        flag("--json", "print one JSON object: rows and extras"),
    )
)
def list_(args: Namespace) -> int:
    """The rows of the matrix, and the sets of extras."""
    import json

    from launcher.base.settings import settings
    from launcher.images.matrix.dockerfile import table
    from launcher.images.matrix.matrix_file import load_lock, load_matrix

    if args.keys:
        from launcher.images.builder.keys import keys

        at = settings().matrix
        for line in keys(load_matrix(), load_lock(at.with_suffix(".lock")), at.parent):
            print(*line)
        return 0
    matrix = load_matrix()
    if args.json:
        print(json.dumps(matrix.model_dump(mode="json", include={"rows", "extras"}), indent=1))
        return 0
    print(table(matrix), end="")
    for name, one in matrix.extras.items():
        print(f"EXTRAS={name}: {one.purpose} ({', '.join([*one.packages, *one.extensions])})")
    return 0


WRITTEN = argument(
    "--output -o --root",
    "where to write (default: beside the matrix, or here where that is an installed one)",
    "FOLDER",
    type=Path,
)


@command(flag("--check", "write nothing, fail if a file differs"), WRITTEN)
def render(args: Namespace) -> int:
    """Write images/, compose/, the tables of README.md and docs/compat.md."""
    from launcher.base.settings import settings
    from launcher.images.matrix import dockerfile
    from launcher.images.matrix.matrix_file import load_lock, load_matrix
    from launcher.tools import compose_examples
    from launcher.tools.trials import html
    from launcher.tools.trials.result import Cell

    site, matrix = settings(), load_matrix()
    root, beside = (args.output or site.written).absolute(), site.matrix.parent
    files = dockerfile.render_all(matrix, load_lock(), root, beside)
    files |= compose_examples.files(matrix, root)
    files |= html.rendered(root, [Cell(tag, row.megatron) for tag, row in matrix.rows.items()])
    changed = dockerfile.drift(files, root)
    if not args.check:
        dockerfile.write(files, root)
        return 0
    for path in changed:
        print(f"{path.relative_to(root)} differs from what `make render` writes", file=sys.stderr)
    return 1 if changed else 0


ANEW = "pin these packages, releases, extensions and images anew; without names, all"


@command(
    argument("--upgrade", ANEW, "NAME", nargs="*"),
    flag("--offline", "ask no server, and list what wasn't checked"),
    WRITTEN,
)
def lock(args: Namespace) -> int:
    """Write matrix.lock; valid pins are kept."""
    from launcher.base.settings import settings
    from launcher.images.matrix.matrix_file import load_lock, load_matrix, lock_path
    from launcher.images.sources import lock

    site, beside = settings(), lock_path()
    path = (args.output or site.written).absolute() / beside.name
    known = next((each for each in (path, beside) if each.exists()), None)
    old = load_lock(known) if known else None
    asking = lock.LockRequest(args.upgrade, args.offline)
    locked = lock.lock(load_matrix(), old, site, Progress(), asking)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock.write(locked, path)
    return 0


@command(
    either(
        flag("--write", "add untried rows to matrix.yaml; as comments, if a fact is missing"),
        flag("--check", "exit with 1 if something is new"),
    ),
    WRITTEN,
)
def news(args: Namespace) -> int:
    """What is new upstream: releases, tags of bases and of extensions."""
    from launcher.base import files, yamlfile
    from launcher.base.settings import settings
    from launcher.images.matrix.schema import Matrix
    from launcher.tools.news import news, proposals

    site = settings()
    text = yamlfile.read(site.matrix, str(site.matrix))
    matrix = yamlfile.parse(text, Matrix, str(site.matrix))
    found = news.look(matrix, site)
    print(news.table(found), end="")
    if args.write:
        path = (args.output or site.written).absolute() / site.matrix.name
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, proposals.propose(matrix, text, found, site))
    return 1 if args.check and any(one.new for one in found) else 0


LABELS = "runner of rows with CUDA{}, by labels: self-hosted,gpu (default: leave these rows out)"


@command(
    argument("tags", "rows of the matrix (default: all but `untried` ones)", "TAG", nargs="*"),
    RELEASES,
    flag("--only-cuda", "leave out rows without CUDA"),
    flag("--allow-none", "if no job is left, print nothing and exit with 0"),
    argument("--cuda-runner", LABELS.format(""), "LABELS", default=""),
    argument("--arm64-runner", LABELS.format(" on arm64"), "LABELS", default=""),
)
def github(args: Namespace) -> int:
    """The jobs of a workflow, as JSON."""
    import json

    from launcher.images.matrix.matrix_file import load_matrix
    from launcher.tools import github
    from launcher.tools.trials.sweep import cells

    matrix = load_matrix()
    tags = args.tags or [tag for tag, row in matrix.rows.items() if not row.untried]
    wanted = [
        (cell.tag, cell.megatron)
        for cell in cells(matrix, tags, args.megatron)
        if matrix.rows[cell.tag].cuda or not args.only_cuda
    ]
    options = {"linux/amd64": "--cuda-runner", "linux/arm64": "--arm64-runner"}
    named = {"linux/amd64": args.cuda_runner, "linux/arm64": args.arm64_runner}
    labels = {platform: re.findall(r"[^\s,]+", text) for platform, text in named.items()}
    found = github.jobs(matrix, wanted, labels)
    for platform, option in options.items():
        left = [job for job in found if job["platform"] == platform and not job["runner"]]
        if left:
            tags = ", ".join(dict.fromkeys(job["tag"] for job in left))
            print(f"left out, as {option} names no runner: {tags}", file=sys.stderr)
    taken = [job for job in found if job["runner"]]
    if taken or not args.allow_none:
        print(json.dumps(github.strategy(taken)))
    return 0


MINUTES = partial(argument, type=above_zero, metavar="MINUTES")


@command(
    argument("tags", "rows of the matrix (all with CUDA, except `untried` ones)", "TAG", nargs="*"),
    RELEASES,
    SOURCE,
    BASES,
    BUILDER,
    argument("--gpus", "N, all, device=0,1; without, the CPU", "WHICH", default="0"),
    flag("--no-train", "build and collect facts, don't train"),
    MINUTES("--limit", "the longest time of a cell (180)", default=180.0),
    MINUTES("--run-limit", "the longest time of a training run (10)", default=10.0),
    argument("--disk", "the most that a cell's images may take", "GB", type=above_zero),
    flag("--keep", "leave images in the engine"),
    either(
        flag("--again", "try cells that are finished, too"),
        flag("--kept", "only write the report of finished cells"),
    ),
    flag("--write", "into docs/compat.json, from which `make render` writes docs/compat.md"),
    argument("-o --output", "", "FOLDER", type=Path, default=Path("compat")),
)
def compat(args: Namespace) -> int:
    """Build and try each row with each release, and report what works.

    1 where one is worse than expected.
    """
    import signal

    from launcher.base.settings import settings
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_lock, load_matrix
    from launcher.runs.runfile.values import parse_gpus
    from launcher.tools.trials import sweep, trial_report

    matrix = load_matrix()
    tags, releases = (matrix.rows, [*matrix.releases]) if args.kept else (matrix.usual, [])
    cells = sweep.cells(matrix, args.tags or tags, args.megatron or releases)
    finished = args.output / "cells"
    parse_gpus(args.gpus)
    if args.write and args.no_train:
        raise UsageError("--write keeps what was trained: leave out --no-train")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: nothing is left running
    engine, lock, options = partial(connect, timeout=600), load_lock(), _options(args)
    say = partial(print, file=sys.stderr, flush=True)
    tried = sweep.Series(engine, settings(), matrix, lock, options, finished, say, args.again)
    results: list[CellResult] = []
    try:
        for one in tried.kept(cells) if args.kept else tried.run(cells):
            results.append(one)
    finally:  # also where the engine went away, or upon Ctrl-C
        if results:
            _report(results, args.output)
    if not results:
        raise UsageError(f"{finished}: no result of this checkout with these options")
    print(trial_report.as_markdown(results), end="")
    if args.write:
        path = trial_report.commit(results, settings().written)
        say(f"{path.name}: written; `make render` puts it into docs/compat.md")
    return 1 if any(one.failure for one in results) else 0


def _report(results: Sequence[CellResult], folder: Path) -> None:
    from launcher.base import files
    from launcher.tools.trials import html, trial_report

    for name, text in (
        ("report.json", trial_report.as_json(results)),
        ("report.xml", trial_report.as_junit(results)),
        ("report.md", trial_report.as_markdown(results)),
        ("report.html", html.as_html(results)),
    ):
        files.write(folder / name, text)


def _options(args: Namespace) -> TrialOptions:
    from launcher.tools.trials.sweep import TrialOptions

    disk = None if args.disk is None else round(args.disk * 1e9)
    return TrialOptions(
        base=args.base,
        builder=args.builder,
        checkout=args.source,
        gpus=args.gpus,
        train=not args.no_train,
        keep=args.keep,
        limit=60 * args.limit,
        run_limit=60 * args.run_limit,
        disk=disk,
    )


@command(actions(list_, render, compat, lock, news, github))
def matrix(args: Namespace) -> int:
    """List the images that can be built, render their Dockerfiles, lock their inputs."""
    return call_action(args)
