"""`launcher image prune`: remove builds of ours that nothing needs, or downloads."""

from __future__ import annotations

import argparse

HELP = "remove our images that no tag names any more, told and asked first; or stale downloads"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("--all", action="store_true", help="all our images that no container uses, named or not")
    add("--keep", type=int, default=0, metavar="N", help="but the last N of each row and release")
    add("--cache", action="store_true", help="in place of images, downloads that no lock mentions")
    add("--dry-run", action="store_true", help="tell what would be removed")
    add("--yes", "-y", action="store_true", help="don't ask")


def main(args: argparse.Namespace) -> int:
    """Tell what would be removed and what that frees, ask, remove."""
    from launcher.errors import UsageError

    if args.keep < 0:
        raise UsageError(f"--keep {args.keep} is no number of images")
    if args.cache and (args.all or args.keep):
        raise UsageError("--cache takes neither --all nor --keep, which are about images")
    return _cache(args) if args.cache else _images(args)


def _images(args: argparse.Namespace) -> int:
    import sys

    from launcher.cli.ps import table
    from launcher.engine import disk
    from launcher.engine.connect import connect
    from launcher.images import prune
    from launcher.settings import settings

    client = connect(timeout=600)
    chosen = prune.to_prune(prune.ours(client), args.all, args.keep)
    rows = [
        (one.id.removeprefix("sha256:")[:12], one.row, one.release, ", ".join(one.names))
        for one in chosen
    ]
    print(table([("ID", "ROW", "MEGATRON", "NAMES"), *rows]) if rows else "", end="")
    if not _agreed(args, len(chosen), "images", prune.freed(chosen, prune.rest(client, chosen))):
        return 0
    stay = {one: reason for one in chosen if (reason := prune.remove(client, one, settings()))}
    for one, reason in stay.items():
        print(f"launcher: {one.id.removeprefix('sha256:')[:12]} stays: {reason}", file=sys.stderr)
    gone = [one for one in chosen if one not in stay]
    print(f"freed {prune.freed(gone, prune.rest(client, gone)) / 1e6:.1f} MB")
    if cached := disk.cached(client):
        print(
            f"launcher: BuildKit's cache keeps {cached / 1e6:.1f} MB that no image uses, layers of "
            "removed ones among it, and builds faster with it: docker builder prune",
            file=sys.stderr,
        )
    return 125 if stay else 0


def _cache(args: argparse.Namespace) -> int:
    from launcher import files
    from launcher.build.inputs import locked_hashes
    from launcher.images import prune
    from launcher.matrix.load import load_lock, load_matrix
    from launcher.settings import settings

    site, matrix = settings(), load_matrix()
    hashes = {*locked_hashes(load_lock()), *(one.sha256 for one in matrix.interpreters.values())}
    chosen = prune.downloads(site, hashes, matrix.repositories)
    size = sum(map(prune.bytes_in, chosen))
    for folder in chosen:
        print(prune.title(folder))
    if not _agreed(args, len(chosen), "downloads", size):
        return 0
    for folder in chosen:
        files.remove_folder(folder, site.cache)
    print(f"freed {size / 1e6:.1f} MB")
    return 0


def _agreed(args: argparse.Namespace, count: int, what: str, size: int) -> bool:
    """Tell what it would free, and ask; nobody is asked where nothing is to be removed."""
    import sys

    from launcher.errors import UsageError

    print(f"{count} {what}, {size / 1e6:.1f} MB")
    if args.dry_run or not count:
        print("nothing was removed")
        return False
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("nothing was removed: there is nobody to ask", "Say --yes.")
    print("Remove them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed")
    return False
