"""`launcher image scan`: known vulnerabilities of what an image adds to its base."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from launcher import names

if TYPE_CHECKING:
    from launcher.images.scan import Finding, Package

HELP = "look up what an image adds among known vulnerabilities"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add(
        "image",
        metavar="TAG|IMAGE",
        type=names.argument(names.image),
        help="a row as matrix.lock has it, or an image's own SBOM",
    )
    add("--megatron", metavar="RELEASE", help="of a row, with another release than its own")
    add(
        "--database",
        metavar="URL|FILE",
        help="an OSV API (https://api.osv.dev), or OSV's all.zip of PyPI on this machine",
    )


def main(args: argparse.Namespace) -> int:
    """One line for each vulnerability; 0 where there is none, 1 where there are any."""
    from launcher.images.scan import API, scan

    packages = _packages(args.image, args.megatron)
    database = args.database or API
    found = scan(packages, database)
    for one in found:
        print(_line(one))
    known = f"{len(found) or 'no'} known {'vulnerability' if len(found) < 2 else 'vulnerabilities'}"
    print(f"{len(packages)} packages, {known} in {database}", file=sys.stderr)
    return 1 if found else 0


def _packages(name: str, megatron: str | None) -> list[Package]:
    """What a row would add, by the lock; what an image adds, by the SBOM beside it."""
    from launcher.errors import UsageError
    from launcher.images import scan
    from launcher.matrix.load import find_release, load_lock, load_matrix

    matrix = load_matrix()
    if name not in matrix.rows:
        if megatron:
            raise UsageError(f"{name}: an image has one release", "Leave --megatron out.")
        return _packages_of_image(name)
    row = matrix.rows[name]
    release = megatron or row.megatron
    version = find_release(matrix, row, release).version or release
    lock = load_lock()
    pins = [*lock.needs[row.abi].runtime, *lock.packages.get(name, ())]
    return scan.of_pins([*pins, f"megatron-core=={version}"])


def _packages_of_image(name: str) -> list[Package]:
    from launcher.build import beside
    from launcher.engine.connect import connect
    from launcher.errors import UsageError
    from launcher.images import scan
    from launcher.images.images import find, reference
    from launcher.matrix.load import load_matrix
    from launcher.settings import settings

    client = connect()
    image = find(client, reference(name, load_matrix().rows))
    documents = beside.kept(image.id, settings())
    if documents.sbom is None:
        raise UsageError(
            f"{name}: what it adds isn't known here: no {beside.SBOM} in {documents.folder}",
            "Scan its row of the matrix, or build it here.",
        )
    beside.check(documents, image.id, beside.record(client, image.id, name))
    return scan.of_sbom(documents.sbom)


def _line(one: Finding) -> str:
    from launcher.screen import printable

    names = " ".join((one.id, *one.aliases))
    fixed = f"fixed in {', '.join(one.fixed)}" if one.fixed else "no fix recorded"
    return printable(f"{one.package.name} {one.package.version}  {names}  {fixed}  {one.summary}")
