"""`launcher image push`: an image into a registry."""

from __future__ import annotations

import argparse

from launcher import names

HELP = "push an image to a registry, and tell its digest"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add(
        "image",
        metavar="NAME",
        type=names.argument(names.image),
        help="24.10 of the matrix, or the name of any image",
    )
    add(
        "--registry",
        metavar="PREFIX",
        type=names.argument(names.registry),
        help="registry.example/team, put before the image's names",
    )


def main(args: argparse.Namespace) -> int:
    """Push all names that the image has; one line for each on stdout."""
    from launcher.build import beside
    from launcher.engine.connect import connect
    from launcher.images import images, referrers, remote
    from launcher.matrix.load import load_matrix
    from launcher.progress import Progress
    from launcher.settings import settings

    name = images.reference(args.image, load_matrix().rows)
    remote.remote_name(name, args.registry)
    client = connect(timeout=3600)
    image = images.find(client, name)
    documents, progress = beside.texts(image.id, settings()), Progress()
    for one in image.names or (name,):
        there = remote.remote_name(one, args.registry)
        pushed = remote.push(client, image.id, there, progress)
        referrers.push(pushed, documents, progress)
        print(f"{pushed.name} {pushed.digest}", flush=True)
    return 0
