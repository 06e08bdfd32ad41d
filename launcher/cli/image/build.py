"""`launcher image build`: rows of the matrix as images."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher import names

HELP = "build one or more rows of the matrix"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("tags", metavar="TAG", nargs="*", help="24.10 … as `matrix list` shows them")
    add("--all", action="store_true", help="all tried rows with CUDA, as `make images`")
    add("--megatron", metavar="RELEASE", help="another release than the row's: 0.10.0")
    add("--source", metavar="PATH", type=Path, help="a Megatron-LM checkout to build")
    add(
        "--base",
        metavar="IMAGE",
        type=names.argument(names.image_for_tag),
        help="in place of the row's base, such as a mirror's: {tag} in it is the tag",
    )
    add(
        "--builder",
        metavar="IMAGE",
        type=names.argument(names.image),
        help="in place of the image that compiles",
    )
    add(
        "--architectures",
        metavar="LIST",
        help='GPUs to compile for, of a row that compiles for them: "80 90" for 8.0 and 9.0',
    )
    add("--jobs", metavar="N", type=int, help="compilers at a time, of such a row (4)")
    add("--no-cache", action="store_true", help="build again, use no cached layer")


def main(args: argparse.Namespace) -> int:
    """Build what was asked for; one line for each image on stdout."""
    from launcher.build.image import Builds, Request, build_all
    from launcher.engine.connect import connect
    from launcher.errors import UsageError
    from launcher.matrix.load import find_row, load_matrix
    from launcher.progress import Progress
    from launcher.settings import expanded, settings

    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs} is no number of compilers")
    matrix = load_matrix()
    tags = matrix.usual if args.all else args.tags
    if not tags:
        raise UsageError("no tag given", f"One of: {', '.join(matrix.rows)}")
    for tag in tags:
        find_row(matrix, tag)
    builds = Builds(connect(timeout=600), settings(), Progress())
    requests = [
        Request(
            tag=tag,
            megatron=args.megatron,
            checkout=expanded(args.source).resolve() if args.source else None,
            base=args.base and args.base.replace("{tag}", tag),
            builder=args.builder,
            no_cache=args.no_cache,
            architectures=args.architectures,
            jobs=args.jobs,
        )
        for tag in tags
    ]
    built, failed = build_all(builds, requests)
    for image in built:
        state = "unchanged" if image.reused else "built"
        origin = f" from {args.source}" if args.source else ""
        print(f"{image.names[0]} {image.id.removeprefix('sha256:')[:12]} {state}{origin}")
    for request, error in failed:
        print(f"launcher: {request.tag}: {error}", file=sys.stderr)
    return failed[0][1].exit_code if failed else 0
