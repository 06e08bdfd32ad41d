"""`launcher shell`: a shell in an image, with the GPUs, the user and the files of a run."""

from __future__ import annotations

import argparse

from launcher import names

HELP = "open a shell in an image: shell [TAG] [-- COMMAND]"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    parser.usage = "%(prog)s [TAG] [options] [-- COMMAND ...]"
    add(
        "tag",
        nargs="?",
        default="24.10",
        metavar="TAG",
        type=names.argument(names.image),
        help="a row, or an image's full name",
    )
    add("--gpus", default="0", metavar="WHICH", help="N, all, 0 (none) or device=0,1")
    add("--source", metavar="PATH", help="a Megatron-LM checkout, in place of the image's")
    add("--backend", default="docker", help="docker or local")


def main(args: argparse.Namespace) -> int:
    """Open it; its exit code is passed on. This folder is the working folder, at /work."""
    from launcher.follow.start import shell

    return shell(args.tag, args.backend, args.gpus, args.source, args.rest)
