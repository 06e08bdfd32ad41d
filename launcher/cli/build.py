"""Commands that make images, or what they are made of: `fetch`, `image build`, `image verify`."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.errors import EngineError, LauncherError, UsageError
from launcher.base.screen import Progress
from launcher.cli.command import (
    ALL,
    BASES,
    BUILDER,
    EXTRAS,
    MEGATRON,
    SOURCE,
    TAGS,
    argument,
    command,
    either,
    flag,
    image,
)

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.base.settings import Settings
    from launcher.images.builder.image import BuildRequest
    from launcher.images.matrix.schema import Matrix

PLATFORM = argument("--platform", "linux/amd64 or linux/arm64 (default: the engine's)", "OS/ARCH")
WITHOUT = "Or leave base and builder out: --no-images"
VERIFY_EXIT_CODES = """\
exit codes:
  0    identical in all that can be claimed with its builder; the last line lists this
  1    it differs
  2    wrong usage: an image from a checkout needs --source
  122  it can't be built again
  125  no engine, no such image, or the engine refused
"""


@command(
    TAGS,
    ALL,
    MEGATRON,
    SOURCE,
    BASES,
    BUILDER,
    argument(
        "--architectures",
        'GPUs for which a `cuda-…` row is compiled: "80 90" for 8.0 and 9.0',
        "LIST",
    ),
    argument("--jobs", "compilers that a `cuda-…` row runs at a time (4)", "N", type=int),
    EXTRAS,
    PLATFORM,
    flag("--no-cache", "build again, without cached layers"),
)
def build(args: Namespace) -> int:
    """Build one or more rows of the matrix."""
    from launcher.base.settings import settings
    from launcher.images.builder.image import Builds, build_all
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_matrix

    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs} is no number of compilers")
    requests = _requests(
        args,
        load_matrix(),
        checkout=args.source,
        no_cache=args.no_cache,
        architectures=args.architectures,
        jobs=args.jobs,
        extras=tuple((args.extras or "").split()),
    )
    builds = Builds(connect(timeout=600), settings(), Progress(), standin=True)
    built, failed = build_all(builds, requests)
    for one in built:
        state = "unchanged" if one.reused else "built"
        origin = f" from {args.source}" if args.source else ""
        print(f"{one.names[0]} {one.id.removeprefix('sha256:')[:12]} {state}{origin}")
    return _tell_failed([(request.tag, error) for request, error in failed])


def _requests(args: Namespace, matrix: Matrix, **departures: Any) -> list[BuildRequest]:
    """What is asked for of each row. Raises UsageError for no row, or one that isn't there."""
    from launcher.images.builder.image import BuildRequest
    from launcher.images.matrix.matrix_file import find_row

    tags = matrix.usual if args.all else args.tags
    if not tags:
        raise UsageError("no tag given", f"One of: {', '.join(matrix.rows)}")
    for tag in tags:
        find_row(matrix, tag)
    common = {"megatron": args.megatron, "builder": args.builder, "platform": args.platform}
    common |= departures
    bases = [args.base and args.base.replace("{tag}", tag) for tag in tags]
    return [BuildRequest(tag, base=base, **common) for tag, base in zip(tags, bases, strict=True)]


def _tell_failed(failed: Sequence[tuple[str, LauncherError]]) -> int:
    """Print them; the exit code of the first, 0 where there is none."""
    for tag, error in failed:
        print(f"launcher: {tag}: {error}", file=sys.stderr)
    return failed[0][1].exit_code if failed else 0


@command(
    image("TAG|IMAGE", "a row such as 24.10 or 24.10-0.9.0, or an image's name"),
    SOURCE,
    image("IMAGE", "a base image in place of the row's, as for `image build`", "--base"),
    BUILDER,
    flag("--keep", "keep what was built for this, and print its name"),
    flag("--diffoscope", "wait for diffoscope without a limit, not only a minute"),
    epilog=VERIFY_EXIT_CODES,
    formatter_class=argparse.RawDescriptionHelpFormatter,
)
def verify(args: Namespace) -> int:
    """Build an image again from the lock, without cache, and compare: verify TAG|IMAGE."""
    from launcher.base.settings import settings
    from launcher.images.carry import image_lookup
    from launcher.images.carry.rebuild import Departures, Verification
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_matrix

    site = settings()
    client = connect(timeout=3600)  # an engine writes 20 GB before it gives the first byte of them
    name = image_lookup.reference(args.image, load_matrix(site.matrix).rows)
    departures = Departures(checkout=args.source, base=args.base, builder=args.builder)
    verification = Verification(client, site, Progress(), print)
    same = verification.verify(name, departures, keep=args.keep, diffoscope=args.diffoscope)
    return 0 if same else 1


@command(
    TAGS,
    ALL,
    MEGATRON,
    BASES,
    BUILDER,
    EXTRAS,
    PLATFORM,
    flag("--no-images", "leave base and builder out"),
    either(
        argument(
            "--output -o --bundle",
            "write the inputs into this folder",
            "DIR",
            type=Path,
            dest="bundle",
        ),
        argument("--from", "read the inputs from such a folder", "DIR", type=Path, dest="bundled"),
    ),
)
def fetch(args: Namespace) -> int:
    """Fetch all inputs of a build; --output and --from carry them to a machine without internet.

    One line for each row and bundle on stdout.
    """
    from launcher.base.settings import settings

    site, progress = settings(), Progress()
    if args.bundled:
        return _take(args, site, progress)
    return _fetch(args, site, progress)


def _fetch(args: Namespace, site: Settings, progress: Progress) -> int:
    """Fetch the rows' inputs and, where asked to, pack them; what can't be had is reported last."""
    from launcher.images.builder import downloads
    from launcher.images.carry import bundle
    from launcher.images.matrix.matrix_file import load_lock, load_matrix
    from launcher.images.matrix.recipe import recipe
    from launcher.images.sources.pins import StartImages

    matrix = load_matrix(site.matrix)
    lock = load_lock(site.matrix.with_suffix(".lock"))
    requests = _requests(args, matrix, extras=tuple((args.extras or "").split()))
    client = None if args.no_images else _engine(bool(args.bundle), progress)
    images = client and StartImages(client, site, progress, lock.images, matrix.moving)
    rows = []
    for request in requests:
        there = matrix.rows[request.tag].platforms
        usual = images.own_platform if images and images.own_platform in there else None
        where = request.platform or usual
        rows.append(
            (recipe(matrix, lock, request.tag, request.megatron, where, request.extras), request)
        )
    fetched, failed = downloads.fetch_all(rows, matrix, images, site, progress)
    for one in fetched:
        size = sum(path.stat().st_size for path in one.files) / 1e6
        held = f"{len(one.files)} files, {size:.1f} MB; {len(set(one.images.values()))} images"
        print(f"{one.recipe.tag} {one.recipe.release}: {held}")
    if args.bundle and not failed:
        size, digest = bundle.write_bundle(_folder(args.bundle), fetched, client, progress)
        print(f"{args.bundle} {size / 1e6:.1f} MB, {bundle.INDEX} {digest}")
    return _tell_failed([(one.tag, error) for one, error in failed])


def _folder(path: Path) -> Path:
    from launcher.base.settings import expanded

    return expanded(path).absolute()


def _engine(must: bool, progress: Progress) -> DockerClient | None:
    """The engine that answers; where none does, none is needed unless images `must` be packed."""
    from launcher.images.engine.connect import connect

    try:
        return connect(timeout=600)
    except EngineError as error:
        if must:
            raise EngineError(error.problem, f"{error.remedy}\n  {WITHOUT}") from error
        progress.note("no container engine answers: base and builder are not fetched")
        return None


def _take(args: Namespace, site: Settings, progress: Progress) -> int:
    """Check a bundle and take all of it; a row that needs more here is reported."""
    from launcher.images.carry import bundle

    if args.tags or args.all:
        raise UsageError("--from takes all that is in the bundle", "Leave the tags out.")
    folder = _folder(args.bundled)
    index = bundle.check_bundle(folder, progress)
    wanted = index.images and not args.no_images
    client = _engine(must=True, progress=progress) if wanted else None
    progress.step(f"take {args.bundled}")
    bundle.take_bundle(folder, index, site, progress)
    progress.close()
    if client:
        bundle.load_images(folder, index, client, progress)
    for tag, lacks in bundle.unmet(index, site):
        progress.note(f"{tag}: the bundle lacks what the lock here names: {lacks}")
    images = len(index.images) if client else 0
    count = sum(file.path.startswith("sha256/") for file in index.files)
    print(
        f"{', '.join(row.tag for row in index.rows)}: {count} files, "
        f"{len(index.commits)} git sources, {images} images"
    )
    return 0
