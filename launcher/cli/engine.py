"""`launcher engine`: a private container engine, for as long as this runs."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "keep a private engine up (Linux, root, apt) and print its DOCKER_HOST"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the folder."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        nargs="?",
        help="keeps the engine's packages and images (default: that of `make demo`)",
    )


def main(args: argparse.Namespace) -> int:
    """Start the engine and wait for Ctrl-C."""
    from functools import partial

    from launcher.engine.private.private import keep_up
    from launcher.settings import settings

    keep_up(args.folder or settings().cache / "engine", partial(print, flush=True))
    return 0
