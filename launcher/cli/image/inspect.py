"""`launcher image inspect`: what an image says of itself, and what was written beside it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from launcher import names

if TYPE_CHECKING:
    from launcher.build.beside import Documents
    from launcher.images.images import Image

HELP = "show an image's labels, what it was built from, its provenance and its contents"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    parser.add_argument(
        "image",
        metavar="IMAGE|TAG",
        type=names.argument(names.image),
        help="24.10, megatron:24.10-0.9.0, an ID",
    )
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")


def main(args: argparse.Namespace) -> int:
    """Print what is known of one image; nothing is built, pulled or written."""
    import json

    from launcher.build import beside
    from launcher.engine.connect import connect
    from launcher.images.images import find, reference
    from launcher.matrix.load import load_matrix
    from launcher.settings import settings

    client = connect()
    image = find(client, reference(args.image, load_matrix().rows))
    names = sorted(client.api.inspect_image(image.id)["RepoTags"] or [])
    record = beside.record(client, image.id, args.image)
    documents = beside.kept(image.id, settings())
    beside.check(documents, image.id, record)
    if args.json:
        found = {
            "id": image.id,
            "names": names,
            "labels": image.labels,
            "build": record,
            "folder": str(documents.folder),
            "provenance": documents.provenance,
            "sbom": documents.sbom,
        }
        print(json.dumps(found, indent=2, sort_keys=True))
    else:
        print(_text(image, names, record, documents), end="")
    return 0


def _text(image: Image, names: list[str], record: dict[str, Any], documents: Documents) -> str:
    """The lines for a person; what isn't there is said."""
    from launcher.build.beside import PROVENANCE, SBOM
    from launcher.screen import printable

    lines = [
        ("image", ", ".join(names) or "without a name"),
        ("id", image.id),
        *((name, value) for name, value in sorted(image.labels.items())),
        ("wheel", f"{record['wheel']['name']} sha256:{record['wheel']['sha256']}"),
        *(("patch", f"{name} sha256:{digest}") for name, digest in record["patches"].items()),
    ]
    absent = f"not on this machine: no {{}} in {documents.folder}"
    if documents.provenance is None:
        lines.append(("provenance", absent.format(PROVENANCE)))
    else:
        definition = documents.provenance["predicate"]["buildDefinition"]
        count = len(definition["resolvedDependencies"])
        lines.append(("provenance", f"{count} inputs: {documents.folder / PROVENANCE}"))
    if documents.sbom is None:
        lines.append(("sbom", absent.format(SBOM)))
    else:
        count = len(documents.sbom["components"])
        lines.append(("sbom", f"{count} components: {documents.folder / SBOM}"))
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:{width}}  {printable(value)}\n" for name, value in lines)
