"""Saves an image from an engine into a folder, layer by layer."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING

from pydantic import BaseModel

from launcher.base import files, owned
from launcher.base.errors import EngineError, UsageError
from launcher.base.screen import Progress
from launcher.base.trust import require_trusted
from launcher.base.unpack import packing
from launcher.images.carry.image_lookup import EngineImage
from launcher.images.oci import oci_layout, packed, saved
from launcher.images.oci.archive import hex_of
from launcher.images.oci.blocks import BLOCK, Seen, hashed, is_whole, read_small, taken
from launcher.images.oci.oci_layout import BaseImage, Blob, Digest, LayoutFile, Listing, Manifest
from launcher.images.oci.saved import Member, SavedImage

if TYPE_CHECKING:
    from docker import DockerClient

INCOMING = "incoming"
BEGUN, BLOB = "begun.json", "blob"
NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC
FOLDERS = (oci_layout.BLOBS, oci_layout.DOCUMENTS)
OURS = {
    *(INCOMING, oci_layout.LISTING, oci_layout.SUMS, oci_layout.INDEX, oci_layout.MARKER),
    *(folder.partition("/")[0] for folder in FOLDERS),
}
OF_SYSTEMS = {"System Volume Information", "lost+found", "$RECYCLE.BIN"}
_AGAIN = "Run the save again: what is in the folder is kept. The engine's own disk may be full."
_PACKED = {"gz": "+gzip", "zst": "+zstd"}


class SaveProgress(BaseModel):
    """What is known of a folder's image before it is complete.

    names: and the ID; blobs: those of layers that are written, by what they are known by before
    they are read: their diff ID, or their digest where they come packed
    """

    names: tuple[str, ...] = ()
    blobs: dict[Digest, Blob] = {}


def save(
    client: DockerClient,
    image: EngineImage,
    folder: Path,
    progress: Progress,
    base: BaseImage | None = None,
    documents: Mapping[str, bytes] = MappingProxyType({}),
) -> Listing:
    """Write `image`, without the layers of `base`, and its `documents` by name, into `folder`.

    Returns the list of its files, which is written when all of them are: a folder where a save was
    cut off isn't taken for a whole one, and the next save keeps the layers that are right in it.
    Raises UsageError for a folder with something else in it, EngineError where the engine doesn't
    give the image.
    """
    begun = _begin(folder, [*image.names, image.id])
    below = len(base.layers) if base else 0
    left_out = set(image.layers[:below]) - set(image.layers[below:])
    blobs: dict[str, Blob] = {}
    with saved.stream_errors(begun.names[0], _AGAIN):
        stream = SavedImage(client.api.get_image(image.id, chunk_size=BLOCK), image.layers)
        for member, file in stream.members():
            if member.diff_id in left_out:
                blobs[member.name] = Blob(digest=member.diff_id, size=member.size)
                continue
            with _shown(progress, member) as seen:
                blob = begun.blobs.get(member.guess or "")
                if blob and is_whole(folder, blob.file):
                    progress.cached()
                else:
                    comes = _packing(file)
                    blob = write_blob(file, member.size, folder, comes, seen)
                    if comes != "":
                        begun.blobs[blob.unpacked or blob.digest] = blob
                        _write_begun(folder, begun)
            blobs[member.name] = blob
        config, names = blobs[stream.config()], stream.layers()
    order = [blobs[name] for name in names]
    _check(folder, image, order)
    carried = [config, *order[below:]]
    listing = _complete(folder, image, base, config, order, carried, documents)
    owned.remove_folder(folder / INCOMING, folder)
    return listing


def take_folder(folder: Path, ours: Collection[str]) -> None:
    """Make a folder, or take one that is empty or was made so, for files that are named `ours`.

    Raises UsageError where something else is in it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    require_trusted(folder)
    if not folder.exists():
        owned.make_folder(folder)
    there = {path.name for path in folder.iterdir()} - OF_SYSTEMS
    there = {name for name in there if not name.startswith(".")}
    if foreign := sorted(there.difference(ours if owned.is_ours(folder) else ())):
        raise UsageError(
            f"{folder} isn't empty, or no launcher has made it: it has {foreign[0]} in it",
            "Name a folder for this alone; it is made where there is none.",
        )
    if not owned.is_ours(folder):
        owned.mark(folder)


def _begin(folder: Path, known: list[str]) -> SaveProgress:
    """Make the folder ready for the image that is `known` by these names and this ID.

    Refuses one with another image, known by none of them, and one with links among its folders.
    """
    begun = _read_begun(folder)
    if begun.names and not {*begun.names} & {*known}:
        raise UsageError(
            f"{folder} holds another image: {', '.join(begun.names)}",
            "Name another folder, or remove this one.",
        )
    take_folder(folder, OURS)
    for each in (INCOMING, *FOLDERS):
        owned.real_folder(folder / each, folder, make=False)
    if not (folder / INCOMING).exists():
        owned.make_folder(folder / INCOMING)
    begun = SaveProgress(names=tuple(known), blobs=begun.blobs)
    _write_begun(folder, begun)
    owned.remove_file(folder / oci_layout.LISTING, folder, missing_ok=True)
    return begun


def _write_begun(folder: Path, begun: SaveProgress) -> None:
    with files.named(folder / INCOMING / BEGUN):
        files.write(folder / INCOMING / BEGUN, begun.model_dump_json())


def _read_begun(folder: Path) -> SaveProgress:
    """What an earlier save, complete or not, has left to know it by; nothing where none is there.

    A complete one's ID is that of its configuration, which engines with containerd's store don't
    know it by: there only its names are known.
    """
    with suppress(OSError, ValueError):
        text = read_small(folder, f"{INCOMING}/{BEGUN}", oci_layout.LARGEST_LISTING)
        return SaveProgress.model_validate_json(text)
    with suppress(OSError):
        text = read_small(folder, oci_layout.LISTING, oci_layout.LARGEST_LISTING)
        if listing := oci_layout.parse(text, Listing):
            names = (*listing.names, listing.image)
            return SaveProgress(names=names, blobs=_blobs(folder, listing))
    return SaveProgress()


def _blobs(folder: Path, listing: Listing) -> dict[str, Blob]:
    """The layers of a complete image, by what they are known by before they are read."""
    found = {}
    with suppress(OSError, ValueError, KeyError):
        text = read_small(folder, oci_layout.blob_path(listing.manifest), oci_layout.LARGEST)
        for layer in Manifest.model_validate_json(text).layers:
            if file := listing.blob(layer.digest):
                found[layer.unpacked or layer.digest] = Blob(
                    digest=layer.digest,
                    size=file.size,
                    media_type=layer.mediaType,
                    unpacked=layer.unpacked,
                )
    return found


def write_blob(
    source: IO[bytes], size: int, folder: Path, packing: str | None, seen: Seen = lambda _: None
) -> Blob:
    """Read `size` bytes of a blob into its file of the layout in `folder`.

    packing: the part of a media type of a packed layer, "" for one that isn't a layer's;
    what is None is packed here
    """
    whole, content, length = hashlib.sha256(), hashlib.sha256(), 0
    blocks = taken(source, size, seen)
    if packing is None:
        blocks = packed.pack(hashed(blocks, content), size)
    aside = folder / INCOMING / BLOB
    with files.named(aside), open(files.open_own(aside, NEW, 0o666), "wb") as file:
        for block in hashed(blocks, whole):
            length += file.write(block)
        file.flush()
        os.fsync(file.fileno())
    blob = Blob(
        digest=f"sha256:{whole.hexdigest()}",
        size=length,
        media_type=oci_layout.LAYER_TYPE + ("+zstd" if packing is None else packing),
        unpacked=f"sha256:{content.hexdigest()}" if packing is None else None,
    )
    path = folder / blob.file.path
    owned.real_folder(path.parent, folder)
    aside.replace(path)
    return blob


@contextmanager
def _shown(progress: Progress, member: Member) -> Iterator[Seen]:
    """A step for a layer, with how much of it is done; nothing for a small file."""
    if not member.name.endswith("layer.tar") and member.size < BLOCK:
        yield lambda _: None
        return
    label = hex_of(member.diff_id or member.guess or member.name)[:12]
    with progress.counted(f"save layer {label}", member.size) as seen:
        yield seen


def _packing(file: io.BufferedReader) -> str | None:
    """How a blob is packed, by its media type, as from engines with containerd's store.

    Nothing for a configuration, which stays as it is, and None for a layer that isn't packed.
    """
    head = file.peek(8)
    return "" if head.lstrip().startswith(b"{") else _PACKED.get(packing(head) or "")


def _check(folder: Path, image: EngineImage, layers: list[Blob]) -> None:
    """Refuse a layer that isn't the one that the image's configuration names."""
    for diff_id, layer in zip(image.layers, layers, strict=True):
        came = layer.unpacked or layer.digest
        if came != diff_id and (layer.unpacked or layer.media_type == oci_layout.LAYER_TYPE):
            owned.remove_file(folder / INCOMING / BEGUN, folder)  # nothing of it is to be kept
            raise EngineError(
                f"{image.id}: the engine gave a layer with the sha256 {came}, "
                f"and the image's is {diff_id}",
                "The engine's store is damaged: remove the image and build or pull it again.",
            )


def _complete(
    folder: Path,
    image: EngineImage,
    base: BaseImage | None,
    config: Blob,
    layers: list[Blob],
    carried: list[Blob],
    documents: Mapping[str, bytes],
) -> Listing:
    """Write what is beside the blobs, list the files, and remove what isn't listed."""
    value = read_small(folder, config.file.path, config.size)
    manifest = oci_layout.manifest(value, layers)
    made = {
        oci_layout.MARKER: oci_layout.LAYOUT,
        oci_layout.blob_path(oci_layout.sha256(manifest)): manifest,
        oci_layout.INDEX: oci_layout.index(manifest, json.loads(value), image.names),
        **{f"{oci_layout.DOCUMENTS}/{name}": content for name, content in documents.items()},
    }
    listed = {blob.file.path: blob.file for blob in carried}
    for path, content in made.items():
        write(folder / path, content)
        listed[path] = LayoutFile(
            path=path, size=len(content), sha256=hex_of(oci_layout.sha256(content))
        )
    listing = Listing(
        format=1,
        names=image.names,
        image=config.digest,
        manifest=oci_layout.sha256(manifest),
        base=base,
        files=tuple(listed[path] for path in sorted(listed)),
    )
    for each in FOLDERS:
        if (folder / each).exists():
            files.sync(folder / each)
    write(folder / oci_layout.SUMS, oci_layout.sums(listing))
    write(folder / oci_layout.LISTING, oci_layout.render(listing))
    for there in chain.from_iterable(folder.glob(f"{one}/*") for one in FOLDERS):
        if there.relative_to(folder).as_posix() not in listed:
            owned.remove_file(there, folder)
    return listing


def write(path: Path, content: bytes) -> None:
    """Write a small file, unless it has these bytes."""
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.named(path):
        files.write(path, content)
