"""`launcher image`: built, carried elsewhere, and here listed, shown, asked, removed."""

from __future__ import annotations

import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from launcher.base.errors import UsageError
from launcher.base.screen import printable
from launcher.cli.build import build, verify
from launcher.cli.command import (
    JSON,
    SOURCE,
    above_zero,
    actions,
    argument,
    call_action,
    command,
    either,
    flag,
    table,
)
from launcher.cli.command import image as image_name
from launcher.cli.transfer import load, pull, push, save

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.images.builder.beside import ImageDocuments
    from launcher.images.carry.image_lookup import EngineImage
    from launcher.tools.trials.image_probe import Fact
    from launcher.tools.trials.trials import TrialResult

COLUMNS = ("ID", "NAME", "ROW", "MEGATRON", "ADDS", "CREATED", "BASE")


@command(either(flag("--quiet -q", "print the IDs alone"), JSON))
def ls(args: Namespace) -> int:
    """List our images: contents, size beyond the base, whether the base is pinned."""
    import json
    from dataclasses import asdict

    from launcher.images.carry.prune import ours
    from launcher.images.engine.connect import connect

    images = ours(connect())
    if args.json:
        print("".join(f"{json.dumps(asdict(image))}\n" for image in images), end="")
        return 0
    if args.quiet:
        print("".join(f"{image.id}\n" for image in images), end="")
        return 0
    rows = [
        (
            image.id.removeprefix("sha256:")[:12],
            name,
            image.row,
            image.release,
            f"{sum(image.added) / 1e6:.1f} MB",
            image.created.partition(".")[0].rstrip("Z"),
            "pinned" if image.pinned else "unpinned",
        )
        for image in images
        for name in image.names or ("",)
    ]
    print(table([COLUMNS, *rows]), end="")
    return 0


@command(
    image_name("IMAGE|TAG", "24.10, megatron:24.10-0.9.0, an ID"),
    flag("--json", "all of it as one JSON object"),
)
def inspect(args: Namespace) -> int:
    """Show an image's labels, inputs, provenance and contents."""
    import json

    from launcher.base.settings import settings
    from launcher.images.builder import beside
    from launcher.images.carry.image_lookup import find, reference
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_matrix

    client = connect()
    image = find(client, reference(args.image, load_matrix().rows))
    names = sorted(client.api.inspect_image(image.id)["RepoTags"] or [])
    record = beside.record(client, image.id, args.image)
    documents = beside.kept(image.id, settings())
    beside.check_documents(documents, image.id, record)
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


def _text(
    image: EngineImage, names: list[str], record: dict[str, Any], documents: ImageDocuments
) -> str:
    """The lines for a person; what isn't there is named."""
    from launcher.images.builder.beside import PROVENANCE, SBOM

    lines = [
        ("image", ", ".join(names) or "without a name"),
        ("id", image.id),
        *((name, value) for name, value in sorted(image.labels.items())),
        ("wheel", f"{record['wheel']['name']} sha256:{record['wheel']['sha256']}"),
        *(("patch", f"{name} sha256:{digest}") for name, digest in record["patches"].items()),
    ]
    made, sbom = documents.provenance, documents.sbom
    inputs = made and made["predicate"]["buildDefinition"]["resolvedDependencies"]
    for name, file, held in (
        ("provenance", PROVENANCE, inputs and f"{len(inputs)} inputs"),
        ("sbom", SBOM, sbom and f"{len(sbom['components'])} components"),
    ):
        absent = f"not on this machine: no {file} in {documents.folder}"
        lines.append((name, f"{held}: {documents.folder / file}" if held else absent))
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:{width}}  {printable(value)}\n" for name, value in lines)


@command(
    image_name("TAG", "a row of the matrix, or any image by its name", "tag", nargs="?"),
    argument("--gpus", "GPUs to try layers on: N, all, device=0,1", "WHICH", default="0"),
    flag("--base", "the row's base in place of the image made from it"),
    flag("--facts", "only the facts, no training"),
    SOURCE,
    argument("--backend", "local: this environment", default="docker", choices=["docker", "local"]),
    argument("--limit", "seconds for a training run (600)", "S", type=above_zero, default=600.0),
    flag("--json", "the same as JSON"),
    flag("--write", "write facts that the row lacks into matrix.yaml"),
)
def probe(args: Namespace) -> int:
    """Collect facts of an image, and train in it.

    1 where a fact failed, or isn't what the row says.
    """
    import json
    from dataclasses import asdict

    from launcher.base.settings import settings
    from launcher.images.matrix.matrix_file import find_row, load_matrix
    from launcher.runs.backends import backend
    from launcher.runs.runfile.values import parse_gpus
    from launcher.tools.trials import image_probe, trials

    if (args.backend == "local") == bool(args.tag):
        raise UsageError(
            "this takes an image, or --backend local without one",
            "Name a row of the matrix (24.10) or an image.",
        )
    parse_gpus(args.gpus)
    matrix = load_matrix()
    row = matrix.rows.get(args.tag)
    if row is None and (args.base or args.write):
        find_row(matrix, args.tag or "")
    image = {"tag": args.tag} if row else {"name": args.tag or "local"}
    if row and args.base:
        image = {"name": row.base}
    chosen = backend(args.backend)
    found = image_probe.ask_image(chosen, image, args.gpus)
    verdicts: dict[str, TrialResult] = {}
    if not (args.facts or args.base):
        verdicts = trials.attempts(chosen, image, args.gpus, args.limit, found, args.source)
    if args.json:
        print(json.dumps({"facts": found, "trials": verdicts}, default=asdict, indent=2))
    else:
        print(_facts(found, verdicts))
    wrong = image_probe.differences(row, found) if row else []
    for line in wrong:
        print(f"launcher: {line}", file=sys.stderr)
    if args.write and row:
        from launcher.base import files

        path = settings().matrix
        new = image_probe.unstated(row, found)
        files.write(path, image_probe.written(path.read_text(encoding="utf-8"), args.tag, new))
        told = ", ".join(f"{key}: {value}" for key, value in new.items()) or "nothing to add"
        print(f"launcher: {path.name}: {told}", file=sys.stderr)
    failed = any(fact.error for fact in found.values())
    return 1 if wrong or failed or any(one.failed for one in verdicts.values()) else 0


def _facts(found: Mapping[str, Fact], verdicts: Mapping[str, TrialResult]) -> str:
    lines = []
    for name, fact in found.items():
        lines += [f"{name:26}{fact}", *(f"{'':26}{line}" for line in fact.warnings)]
    for name, verdict in verdicts.items():
        told = (*verdict.warnings, *verdict.tail)
        lines += [f"{name:26}{verdict}", *(f"{'':26}{line}" for line in told)]
    return "\n".join(lines)


@command(
    flag("--all", "also images with a name, if no container uses them"),
    argument("--keep", "keep the last N of each row and release", "N", type=int, default=0),
    flag("--cache", "remove downloads that no lock mentions, not images"),
    flag("--dry-run", "print what would be removed"),
    flag("--yes -y", "don't ask"),
)
def prune(args: Namespace) -> int:
    """Ask, then remove our images that have no name; or unused downloads."""

    if args.keep < 0:
        raise UsageError(f"--keep {args.keep} is no number of images")
    if args.cache and (args.all or args.keep):
        raise UsageError("--cache takes neither --all nor --keep, which are about images")
    return _cache(args) if args.cache else _images(args)


def _images(args: Namespace) -> int:
    from launcher.base.settings import settings
    from launcher.images.carry import prune
    from launcher.images.engine import disk
    from launcher.images.engine.connect import connect

    client = connect(timeout=600)
    chosen = prune.to_prune(prune.ours(client), args.all, args.keep)
    rows = [
        (one.id.removeprefix("sha256:")[:12], one.row, one.release, ", ".join(one.names))
        for one in chosen
    ]
    print(table([("ID", "ROW", "MEGATRON", "NAMES"), *rows]) if rows else "", end="")
    if not _agreed(args, len(chosen), "images", prune.freed(chosen, prune.rest(client, chosen))):
        return 0
    stay = {one: reason for one in chosen if (reason := prune.remove(client, one, settings()))}
    for one, reason in stay.items():
        print(f"launcher: {one.id.removeprefix('sha256:')[:12]} stays: {reason}", file=sys.stderr)
    gone = [one for one in chosen if one not in stay]
    print(f"freed {prune.freed(gone, prune.rest(client, gone)) / 1e6:.1f} MB")
    if cached := sum(int(record["Size"]) for record in (disk.cached(client) or {}).values()):
        print(
            f"launcher: BuildKit's cache keeps {cached / 1e6:.1f} MB that no image uses, layers of "
            "removed ones among it, and builds faster with it: docker builder prune",
            file=sys.stderr,
        )
    return 125 if stay else 0


def _cache(args: Namespace) -> int:
    from launcher.base import owned
    from launcher.base.settings import settings
    from launcher.images.carry import prune
    from launcher.images.matrix.matrix_file import load_lock, load_matrix
    from launcher.images.matrix.recipe import locked_hashes
    from launcher.images.sources import extras_lock

    site, matrix = settings(), load_matrix()
    hashes = {*locked_hashes(load_lock()), *(one.sha256 for one in matrix.interpreters.values())}
    hashes |= extras_lock.locked_hashes(site)
    chosen = prune.downloads(site, hashes, matrix.repositories)
    size = sum(map(prune.bytes_in, chosen))
    for folder in chosen:
        print(prune.title(folder))
    if not _agreed(args, len(chosen), "downloads", size):
        return 0
    for folder in chosen:
        owned.remove_folder(folder, site.cache)
    print(f"freed {size / 1e6:.1f} MB")
    return 0


def _agreed(args: Namespace, count: int, what: str, size: int) -> bool:
    """Print what it would free, and ask; nobody is asked where nothing is to be removed."""
    print(f"{count} {what}, {size / 1e6:.1f} MB")
    if args.dry_run or not count:
        print("nothing was removed")
        return False
    if args.yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("nothing was removed: no terminal to ask on", "Say --yes.")
    print("Remove them? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("nothing was removed")
    return False


@command(actions(build, ls, verify, inspect, probe, save, load, push, pull, prune))
def image(args: Namespace) -> int:
    """Build images of the matrix, check them, carry them to other machines."""
    return call_action(args)
