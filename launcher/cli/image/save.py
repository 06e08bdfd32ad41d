"""`launcher image save`: an image as a folder of checked files, to carry elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher import names

HELP = "write an image into a folder, to carry it to another machine"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add(
        "image",
        metavar="TAG",
        type=names.argument(names.image),
        help="24.10 of the matrix, or the name of any image",
    )
    add("-o", "--output", metavar="DIR", type=Path, required=True, help="a folder for it alone")
    add("--thin", action="store_true", help="without the layers of its base")
    add(
        "--base",
        metavar="IMAGE",
        type=names.argument(names.image),
        help="leave out the layers of this image, which the other side has, instead of the base's",
    )
    add(
        "--part-size",
        metavar="SIZE",
        default="1G",
        help="split files beyond this size (500M; default 1G; FAT takes less than 4G)",
    )


def main(args: argparse.Namespace) -> int:
    """Save the image; one line on stdout."""
    from launcher.build import beside
    from launcher.engine.connect import connect
    from launcher.images import images
    from launcher.images.save import save
    from launcher.images.shown import bytes_of, size
    from launcher.matrix.load import load_matrix
    from launcher.progress import Progress
    from launcher.settings import expanded, settings

    part_size = bytes_of(args.part_size)
    rows = load_matrix().rows
    client = connect(timeout=600)
    image = images.find(client, images.reference(args.image, rows))
    other = images.reference(args.base, rows) if args.base else None
    base = images.base_of(client, image, rows, other) if args.thin or other else None
    folder = expanded(args.output).absolute()
    documents = beside.texts(image.id, settings())
    outcome = save(client, image, folder, part_size, Progress(), base, documents)
    name, listing = (*image.names, image.id)[0], outcome.listing
    without = f" without the {len(base.layers)} layers of {base.name}" if base else ""
    print(f"{name} saved in {folder}: {size(outcome.size)}{without}, manifest {listing.manifest}")
    return 0
