"""`launcher matrix`: list, render and lock what can be built."""

from __future__ import annotations

import argparse
import sys

from launcher.cli import compat

HELP = "list the images that can be built, render their Dockerfiles, lock their inputs"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    commands.add_parser("list", help="the rows of the matrix")
    render = commands.add_parser("render", help="write images/, compose/ and README's table")
    render.add_argument("--check", action="store_true", help="only fail where they differ")
    compat.arguments(commands.add_parser("compat", help=compat.HELP, description=compat.HELP))
    commands.add_parser("lock", help="write matrix.lock")


def main(args: argparse.Namespace) -> int:
    """Call the action."""
    actions = {"list": _list, "render": _render, "lock": _lock, "compat": compat.main}
    return actions[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from launcher.matrix.load import load_matrix
    from launcher.matrix.render import table

    print(table(load_matrix()), end="")
    return 0


def _render(args: argparse.Namespace) -> int:
    from launcher.backends import compose_examples
    from launcher.matrix import render
    from launcher.matrix.load import load_matrix
    from launcher.settings import settings

    root, matrix = settings().matrix.parent, load_matrix()
    files = render.render_all(matrix, root) | compose_examples.files(matrix, root)
    changed = render.drift(files, root)
    if not args.check:
        render.write(files, root)
        return 0
    for path in changed:
        print(f"{path.relative_to(root)} differs from what `make render` writes", file=sys.stderr)
    return 1 if changed else 0


def _lock(args: argparse.Namespace) -> int:
    from launcher.matrix import lock
    from launcher.matrix.load import load_lock, load_matrix, lock_path
    from launcher.progress import Progress
    from launcher.settings import settings

    path = lock_path()
    old = load_lock() if path.exists() else None

    locked = lock.lock(load_matrix(), old, settings(), Progress())
    lock.write(locked, path)
    return 0
