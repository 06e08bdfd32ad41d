"""`launcher image load`: a saved image into the engine, checked before anything is loaded."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "load an image that `image save` wrote, after checking every file"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("folder", metavar="DIR", type=Path, help="what `image save -o` wrote")
    add("--digest", metavar="sha256:…", help="what `image save` said, or the image's ID")
    add(
        "--all-tags",
        action="store_true",
        help="give it all names that it was saved with, and not those of megatron: alone",
    )


def main(args: argparse.Namespace) -> int:
    """Check and load; one line on stdout."""
    from launcher import files
    from launcher.engine.connect import connect
    from launcher.images import images
    from launcher.images.load import load, put_beside
    from launcher.oci.saved import hex_of
    from launcher.progress import Progress
    from launcher.settings import expanded, settings

    progress, folder = Progress(), expanded(args.folder).absolute()
    expected = images.digest(args.digest) if args.digest else None
    if not expected:  # what is expected can't be changed by whoever can write there
        files.require_trusted(folder)
    client = connect(timeout=3600)
    loaded = load(client, folder, progress, expected, all_tags=args.all_tags)
    put_beside(client, loaded, settings(), progress)
    for name in loaded.moved:
        progress.note(f"{name} named another image before; that one is still there, by its ID")
    for name in loaded.left:
        progress.note(f"{name} stays as it is here; --all-tags gives it to this image")
    print(f"{' '.join(loaded.names) or loaded.id} {hex_of(loaded.id)[:12]} loaded")
    return 0
