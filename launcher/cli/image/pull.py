"""`launcher image pull`: an image from a registry, compared with the digest that is expected."""

from __future__ import annotations

import argparse

from launcher import names

HELP = "pull an image from a registry, and check that it is the expected one"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add(
        "image",
        metavar="NAME",
        type=names.argument(names.image),
        help="24.10 of the matrix, or an image's name at a registry",
    )
    add(
        "--registry",
        metavar="PREFIX",
        type=names.argument(names.registry),
        help="registry.example/team, which is before the name there",
    )
    add("--digest", metavar="sha256:…", help="what `image push` said, or the image's ID")


def main(args: argparse.Namespace) -> int:
    """Pull, check and name it; one line on stdout."""
    from launcher.engine.connect import connect
    from launcher.images import images, referrers, remote
    from launcher.matrix.load import load_lock, load_matrix
    from launcher.progress import Progress
    from launcher.settings import settings

    site = settings()
    matrix, lock = load_matrix(), load_lock(site.matrix.with_suffix(".lock"))
    name = images.reference(args.image, matrix.rows)
    locked = lock.images.get(name)
    published = locked is not None and not args.registry
    there = site.mirrored(name) if published else remote.remote_name(name, args.registry)
    expected = [images.digest(args.digest)] if args.digest else []
    if locked is not None and not expected:
        expected = [locked.digest, *sorted(locked.digests - {locked.digest})]
        if published and name in matrix.moving:  # wherever its publisher has put the tag by now
            there = f"{remote.split(there)[0]}@{locked.digest}"
    client = connect(timeout=3600)
    progress = Progress()
    pulled = remote.pull(client, there, progress, expected, None if "@" in name else name)
    referrers.pull(client, pulled, site, progress)
    print(f"{name} {pulled.id.removeprefix('sha256:')[:12]} pulled, {pulled.digest}")
    return 0
