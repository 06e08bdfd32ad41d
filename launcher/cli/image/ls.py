"""`launcher image ls`: the images that were built here."""

from __future__ import annotations

import argparse

HELP = "list our images: what is in them, what they add to their base, whether it is pinned"
COLUMNS = ("ID", "NAME", "ROW", "MEGATRON", "ADDS", "CREATED", "BASE")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    parser.add_argument("--quiet", "-q", action="store_true", help="print the IDs alone")


def main(args: argparse.Namespace) -> int:
    """Print a table, a line for each name of an image."""
    from launcher.cli.ps import table
    from launcher.engine.connect import connect
    from launcher.images.prune import ours

    images = ours(connect())
    if args.quiet:
        print("".join(f"{image.id}\n" for image in images), end="")
        return 0
    rows = [
        (
            image.id.removeprefix("sha256:")[:12],
            name,
            image.row,
            image.release,
            f"{sum(image.added) / 1e6:.1f} MB",
            image.created.partition(".")[0].rstrip("Z"),
            "pinned" if image.pinned else "unpinned",
        )
        for image in images
        for name in image.names or ("",)
    ]
    print(table([COLUMNS, *rows]), end="")
    return 0
