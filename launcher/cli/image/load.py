"""`launcher image load`: a saved image into the engine, checked before anything is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "load an image that `image save` wrote, after checking every file"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    parser.add_argument("folder", metavar="DIR", type=Path, help="what `image save -o` wrote")


def main(args: argparse.Namespace) -> int:
    """Check and load; one line on stdout."""
    from launcher.build import beside
    from launcher.engine.connect import connect
    from launcher.progress import Progress
    from launcher.settings import expanded, settings
    from launcher.transfer.load import load
    from launcher.transfer.saved import hex_of

    progress = Progress()
    loaded = load(connect(timeout=3600), expanded(args.folder).absolute(), progress)
    beside.put(loaded.documents, loaded.id, settings())
    for name in loaded.moved:
        progress.note(f"{name} named another image before; that one is still there, by its ID")
    print(f"{' '.join(loaded.names) or loaded.id} {hex_of(loaded.id)[:12]} loaded")
    return 0
