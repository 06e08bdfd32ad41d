"""`launcher matrix`: list, render and lock what can be built; try it, here or in CI."""

from __future__ import annotations

import sys
from argparse import Namespace

from launcher.cli.command import RELEASES, actions, argument, call_action, command, flag
from launcher.cli.compat import compat


@command()
def list(args: Namespace) -> int:
    """The rows of the matrix."""
    from launcher.matrix.load import load_matrix
    from launcher.matrix.render import table

    print(table(load_matrix()), end="")
    return 0


@command(flag("--check", "only fail where they differ"))
def render(args: Namespace) -> int:
    """Write images/, compose/, README's tables."""
    from launcher.backends import compose_examples
    from launcher.matrix import render
    from launcher.matrix.load import load_matrix
    from launcher.settings import settings
    from launcher.trials import kept

    root, matrix = settings().matrix.parent, load_matrix()
    files = render.render_all(matrix, root) | compose_examples.files(matrix, root)
    files |= kept.files(files, root)
    changed = render.drift(files, root)
    if not args.check:
        render.write(files, root)
        return 0
    for path in changed:
        print(f"{path.relative_to(root)} differs from what `make render` writes", file=sys.stderr)
    return 1 if changed else 0


ANEW = "ask anew for these packages, releases, extensions and images; for all where none is named"


@command(
    argument("--upgrade", ANEW, "NAME", nargs="*"),
    flag("--offline", "ask nobody, and name what wasn't asked"),
)
def lock(args: Namespace) -> int:
    """Write matrix.lock; pins that hold are kept."""
    from launcher.build import lock
    from launcher.matrix.load import load_lock, load_matrix, lock_path
    from launcher.progress import Progress
    from launcher.settings import settings

    path = lock_path()
    old = load_lock() if path.exists() else None
    asking = lock.Asking(args.upgrade, args.offline)
    locked = lock.lock(load_matrix(), old, settings(), Progress(), asking)
    lock.write(locked, path)
    return 0


LABELS = "takes rows with CUDA{}, such as self-hosted,gpu; without it they are left out"


@command(
    argument("tags", "rows of the matrix (all tried ones)", "TAG", nargs="*"),
    RELEASES,
    flag("--only-cuda", "leave out rows without CUDA"),
    flag("--allow-none", "print nothing where no job is left"),
    argument("--cuda-runner", LABELS.format(""), "LABELS", default=""),
    argument("--arm64-runner", LABELS.format(" on arm64"), "LABELS", default=""),
)
def github(args: Namespace) -> int:
    """The jobs of a workflow, as JSON."""
    import json
    import re

    from launcher.matrix import github
    from launcher.matrix.load import load_matrix
    from launcher.trials.series import cells

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


@command(actions(list, render, compat, lock, github))
def matrix(args: Namespace) -> int:
    """List the images that can be built, render their Dockerfiles, lock their inputs."""
    return call_action(args)
