"""`launcher image verify`: build an image again from the lock and compare."""

from __future__ import annotations

import argparse
from pathlib import Path

from launcher import names

HELP = "build an image again from the lock, without cache, and compare: verify TAG|IMAGE"

EPILOG = """\
exit codes:
  0    identical in all that its builder lets be claimed; the last line says what that is
  1    it differs
  2    wrong usage: an image from a checkout needs --source
  122  it can't be built again
  125  no engine, no such image, or the engine refused
"""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "image",
        metavar="TAG|IMAGE",
        type=names.argument(names.image),
        help="a row such as 24.10 or 24.10-0.9.0, or an image's name",
    )
    add("--source", metavar="PATH", type=Path, help="the Megatron-LM checkout it was built from")
    add(
        "--base",
        metavar="IMAGE",
        type=names.argument(names.image),
        help="in place of the row's base, as of `image build`",
    )
    add(
        "--builder",
        metavar="IMAGE",
        type=names.argument(names.image),
        help="in place of the image that compiles",
    )
    add("--keep", action="store_true", help="keep what was built for this, and print its name")
    add(
        "--diffoscope",
        action="store_true",
        help="wait for diffoscope, which is else ended after a minute",
    )


def main(args: argparse.Namespace) -> int:
    """Print how the two compare; 1 where they differ."""
    from launcher.engine.connect import connect
    from launcher.images import images
    from launcher.images.again import Departures, Verification
    from launcher.matrix.load import load_matrix
    from launcher.progress import Progress
    from launcher.settings import expanded, settings

    site = settings()
    client = connect(timeout=3600)  # an engine writes 20 GB before it gives the first byte of them
    name = images.reference(args.image, load_matrix(site.matrix).rows)
    departures = Departures(
        checkout=expanded(args.source).resolve() if args.source else None,
        base=args.base,
        builder=args.builder,
    )
    verification = Verification(client, site, Progress(), print)
    same = verification.verify(name, departures, keep=args.keep, diffoscope=args.diffoscope)
    return 0 if same else 1
