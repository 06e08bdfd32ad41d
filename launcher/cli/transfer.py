"""`launcher image save`, `load`, `push` and `pull`: an image carried elsewhere."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from launcher.base import names
from launcher.base.screen import Progress, size
from launcher.cli.command import argument, command, flag, image

NAMED = "24.10 of the matrix, or the name of any image"


@command(
    image("TAG", NAMED),
    argument("-o --output", "a folder for this image alone", "DIR", type=Path, required=True),
    flag("--thin", "leave out the layers of its base"),
    image(
        "IMAGE",
        "leave out the layers of this image, which the other side has, instead of the base's",
        "--base",
    ),
)
def save(args: Namespace) -> int:
    """Write an image into a folder, to carry it to another machine."""
    from launcher.base.settings import expanded, settings
    from launcher.images.builder import beside
    from launcher.images.carry import image_lookup
    from launcher.images.carry.save import save
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_matrix

    rows = load_matrix().rows
    client = connect(timeout=600)
    image = image_lookup.find(client, image_lookup.reference(args.image, rows))
    other = image_lookup.reference(args.base, rows) if args.base else None
    base = image_lookup.base_of(client, image, rows, other) if args.thin or other else None
    folder = expanded(args.output).absolute()
    documents = beside.texts(image.id, settings())
    listing = save(client, image, folder, Progress(), base, documents)
    name = (*image.names, image.id)[0]
    without = f" without the {len(base.layers)} layers of {base.name}" if base else ""
    print(f"{name} saved in {folder}: {size(listing.size)}{without}, manifest {listing.manifest}")
    return 0


@command(
    argument("folder", "what `image save -o` wrote", "DIR", type=Path),
    argument("--digest", "what `image save` printed, or the image's ID", "sha256:…"),
    flag(
        "--all-tags", "give it all names that it was saved with, and not those of megatron: alone"
    ),
)
def load(args: Namespace) -> int:
    """Load an image that `image save` wrote, after checking every file."""
    from launcher.base.settings import expanded, settings
    from launcher.base.trust import require_trusted
    from launcher.images.carry import image_lookup
    from launcher.images.carry.load import load, put_beside
    from launcher.images.engine.connect import connect
    from launcher.images.oci.archive import hex_of

    progress, folder = Progress(), expanded(args.folder).absolute()
    expected = image_lookup.digest(args.digest) if args.digest else None
    if not expected:  # what is expected can't be changed by whoever can write there
        require_trusted(folder)
    client = connect(timeout=3600)
    loaded = load(client, folder, progress, expected, all_tags=args.all_tags)
    put_beside(client, loaded, settings(), progress)
    for name in loaded.moved:
        progress.note(f"{name} named another image before; that one is still there, by its ID")
    for name in loaded.left:
        progress.note(f"{name} stays as it is here; --all-tags gives it to this image")
    print(f"{' '.join(loaded.names) or loaded.id} {hex_of(loaded.id)[:12]} loaded")
    return 0


@command(
    image("NAME", NAMED),
    image(
        "PREFIX",
        "registry.example/team, put before the image's names",
        "--registry",
        check=names.registry,
    ),
)
def push(args: Namespace) -> int:
    """Push an image to a registry, and print its digest."""
    from launcher.images.carry import image_lookup, remote
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_matrix

    name = image_lookup.reference(args.image, load_matrix().rows)
    remote.remote_name(name, args.registry)
    client = connect(timeout=3600)
    image = image_lookup.find(client, name)
    progress = Progress()
    for one in image.names or (name,):
        there = remote.remote_name(one, args.registry)
        pushed = remote.push(client, image.id, there, progress)
        print(f"{pushed.name} {pushed.digest}", flush=True)
    return 0


@command(
    image("NAME", "24.10 of the matrix, or an image's name at a registry"),
    image(
        "PREFIX",
        "registry.example/team, which is before the name there",
        "--registry",
        check=names.registry,
    ),
    argument("--digest", "what `image push` printed, or the image's ID", "sha256:…"),
)
def pull(args: Namespace) -> int:
    """Pull an image from a registry, and check that it is the expected one."""
    from launcher.base.reference import parse_reference
    from launcher.base.settings import settings
    from launcher.images.carry import image_lookup, remote
    from launcher.images.engine.connect import connect
    from launcher.images.matrix.matrix_file import load_lock, load_matrix

    site = settings()
    matrix, lock = load_matrix(), load_lock(site.matrix.with_suffix(".lock"))
    name = image_lookup.reference(args.image, matrix.rows)
    locked = lock.images.get(name)
    published = locked is not None and not args.registry
    there = site.mirrored(name) if published else remote.remote_name(name, args.registry)
    expected = [image_lookup.digest(args.digest)] if args.digest else []
    if locked is not None and not expected:
        expected = [locked.digest, *sorted(locked.digests - {locked.digest})]
        if published and name in matrix.moving:  # wherever its publisher has put the tag by now
            there = f"{parse_reference(there).name}@{locked.digest}"
    client = connect(timeout=3600)
    pulled = remote.pull(client, there, Progress(), expected, None if "@" in name else name)
    print(f"{name} {pulled.id.removeprefix('sha256:')[:12]} pulled, {pulled.digest}")
    return 0
