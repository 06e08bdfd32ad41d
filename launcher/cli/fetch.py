"""`launcher fetch`: the inputs of builds, ahead of them, and to machines with no internet."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import names

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.progress import Progress
    from launcher.settings import Settings

HELP = "fetch all that a build reads; --bundle and --from carry it to a machine with no internet"


WITHOUT = "Or leave base and builder out: --no-images"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare rows, what departs from them, and the bundle."""
    add = parser.add_argument
    add("tags", metavar="TAG", nargs="*", help="24.10 … as `matrix list` shows them")
    add("--all", action="store_true", help="all tried rows with CUDA, as `make images`")
    add("--megatron", metavar="RELEASE", help="another release than the row's: 0.10.0")
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
        "--platform", metavar="OS/ARCH", help="linux/arm64, of a row for several; else the engine's"
    )
    add("--no-images", action="store_true", help="leave base and builder out")
    bundle = parser.add_mutually_exclusive_group()
    bundle.add_argument("--bundle", metavar="FILE", type=Path, help="pack it all into one tar")
    bundle.add_argument(
        "--from",
        metavar="FILE",
        type=Path,
        dest="source",
        help="take what was packed with --bundle",
    )


def main(args: argparse.Namespace) -> int:
    """Fetch, pack or take; one line for each row and bundle on stdout."""
    from launcher.progress import Progress
    from launcher.settings import settings

    site, progress = settings(), Progress()
    if args.source:
        return _take(args, site, progress)
    return _fetch(args, site, progress)


def _fetch(args: argparse.Namespace, site: Settings, progress: Progress) -> int:
    """Fetch the rows' inputs and, where asked to, pack them; what can't be had is told last."""
    from launcher.build import inputs
    from launcher.build.image import Request
    from launcher.build.pins import Images
    from launcher.errors import UsageError
    from launcher.images import bundle
    from launcher.matrix.load import find_row, load_lock, load_matrix

    matrix = load_matrix(site.matrix)
    lock = load_lock(site.matrix.with_suffix(".lock"))
    tags = matrix.usual if args.all else args.tags
    if not tags:
        raise UsageError("no tag given", f"One of: {', '.join(matrix.rows)}")
    asked = {tag: find_row(matrix, tag) for tag in tags}
    client = None if args.no_images else _engine(bool(args.bundle), progress)
    own = _platform(client, args.platform) if client else None
    rows = [
        inputs.needed(
            matrix,
            lock,
            Request(
                tag=tag,
                megatron=args.megatron,
                base=args.base and args.base.replace("{tag}", tag),
                builder=args.builder,
            ),
            args.platform or (own if own in row.platforms else None),
        )
        for tag, row in asked.items()
    ]
    images = client and Images(client, site, progress, lock.images, matrix.moving)
    fetched, failed = inputs.fetch_all(rows, images, site, progress)
    for one in fetched:
        size = sum(path.stat().st_size for path in one.files)
        held = (
            f"{len(one.files)} files, {size / 1e6:.1f} MB; {len(set(one.images.values()))} images"
        )
        print(f"{one.row.tag} {one.row.release}: {held}")
    if args.bundle and not failed:
        digest = bundle.write(args.bundle, fetched, client, progress)
        print(f"{args.bundle} {args.bundle.stat().st_size / 1e6:.1f} MB sha256:{digest}")
    for row, error in failed:
        print(f"launcher: {row.tag}: {error}", file=sys.stderr)
    return failed[0][1].exit_code if failed else 0


def _engine(must: bool, progress: Progress) -> DockerClient | None:
    """The engine that answers; where none does, none is needed unless images `must` be packed."""
    from launcher.engine.connect import connect
    from launcher.errors import EngineError

    try:
        return connect(timeout=600)
    except EngineError as error:
        if must:
            raise EngineError(error.problem, f"{error.remedy}\n  {WITHOUT}") from error
        progress.note("no container engine answers: base and builder are not fetched")
        return None


def _platform(client: DockerClient, asked: str | None) -> str:
    """What an engine pulls images for; refuse one that isn't what is asked for."""
    from launcher.errors import UsageError

    version = client.version()
    own = f"{version['Os']}/{version['Arch']}"
    if asked and asked != own:
        raise UsageError(f"--platform: this engine pulls images for {own}", WITHOUT)
    return own


def _take(args: argparse.Namespace, site: Settings, progress: Progress) -> int:
    """Check a bundle and take all of it; a row that needs more here is told."""
    from launcher.errors import UsageError
    from launcher.images import bundle

    if args.tags or args.all:
        raise UsageError("--from takes all that is in the bundle", "Leave the tags out.")
    progress.step(f"check {args.source}")
    index = bundle.check(args.source)
    wanted = index.images and not args.no_images
    client = _engine(must=True, progress=progress) if wanted else None
    progress.step(f"take {args.source}")
    bundle.take(args.source, index, site, progress)
    progress.close()
    if client:
        bundle.load(args.source, index, client, progress)
    for tag, lacks in bundle.unmet(index, site):
        progress.note(f"{tag}: the lock here wants what the bundle doesn't have: {lacks}")
    images = len(index.images) if client else 0
    print(
        f"{', '.join(row.tag for row in index.rows)}: {len(index.files)} files, "
        f"{len(index.commits)} git sources, {images} images"
    )
    return 0
