"""Writes an image of an engine into a folder, layer by layer, as the engine gives them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from launcher import files
from launcher.errors import EngineError, UsageError
from launcher.images.images import Image
from launcher.images.shown import counted
from launcher.oci import layout, parts, saved
from launcher.oci.layout import Base, File, Layer, Listing, Manifest
from launcher.oci.parts import Blob
from launcher.oci.saved import Member, Saved, hex_of
from launcher.progress import Progress

if TYPE_CHECKING:
    from docker import DockerClient

INCOMING = "incoming"
NAMES = "names.json"
FILES = (layout.LISTING, layout.SUMS, layout.INDEX, layout.MARKER)
FOLDERS = (layout.BLOBS, layout.PARTS, layout.DOCUMENTS)
OURS = {INCOMING, *FILES, *(folder.partition("/")[0] for folder in FOLDERS)}
OF_SYSTEMS = {"System Volume Information", "lost+found", "$RECYCLE.BIN"}
_AGAIN = "Run the save again: what is in the folder is kept. The engine's own disk may be full."
_PACKED = {b"\x1f\x8b": "+gzip", b"\x28\xb5\x2f\xfd": "+zstd"}


@dataclass(frozen=True)
class Outcome:
    """What a save left: its list of files, their bytes, and how many of them were there already."""

    listing: Listing
    kept: int

    @property
    def size(self) -> int:
        """Bytes of all files that are listed."""
        return sum(file.size for file in self.listing.files)


def save(
    client: DockerClient,
    image: Image,
    folder: Path,
    part_size: int,
    progress: Progress,
    base: Base | None = None,
    documents: Mapping[str, bytes] = MappingProxyType({}),
) -> Outcome:
    """Write `image`, without the layers of `base`, and its `documents` by name, into `folder`.

    Files are listed when all are written: a folder where a save was cut off isn't taken for a
    whole one, and the next save keeps what is right in it. Raises UsageError for a folder with
    something else in it, EngineError where the engine doesn't give the image.
    """
    known = [*image.names, image.id]
    incoming = _prepare(folder, known)
    below = len(base.layers) if base else 0
    left_out = set(image.layers[:below]) - set(image.layers[below:])
    blobs: dict[str, Blob] = {}
    layers: dict[str, Layer] = {}
    taken: set[str] = set()
    files.remove_file(folder / layout.LISTING, folder, missing_ok=True)
    there = _packed_in(folder, image)
    with saved.told(known[0], _AGAIN):
        stream = Saved(client.api.get_image(image.id, chunk_size=parts.BLOCK), image.layers)
        for member, file in stream.members():
            if member.diff_id in left_out:
                layers[member.name] = Layer(member.diff_id, member.size)
                continue
            name = _take_back(member, folder, incoming, there, taken)
            packing = _packing(file)
            with _shown(progress, member) as seen:
                blob = parts.write(
                    file, member.size, incoming, name, part_size, packing is None, seen
                )
                if blob.kept == blob.size:
                    progress.cached()
            blobs[member.name] = blob
            media_type = layout.LAYER_TYPE + ("+zstd" if packing is None else packing)
            layers[member.name] = Layer(blob.digest, blob.size, media_type, blob.unpacked)
        config, names = stream.config(), stream.layers()
        order = [layers[name] for name in names]
        _check(image, order)
        carried = [blobs[name] for name in {config, *names[below:]}]
    listing = _complete(folder, image, base, blobs[config], order, carried, documents)
    files.remove_folder(incoming, folder)
    return Outcome(listing, sum(blob.kept for blob in carried))


def _prepare(folder: Path, known: list[str]) -> Path:
    """The folder for incoming files of the image that is `known` by these names and this ID.

    Refuses a folder with another image, known by none of them, or with other things in it, and one
    with an image's files that no save of ours has made, or with links among its folders.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    files.require_trusted(folder)
    incoming = folder / INCOMING
    held = _known_in(folder)
    if held and not {*held} & {*known}:
        raise UsageError(
            f"{folder} holds another image: {', '.join(held)}",
            "Name another folder, or remove this one.",
        )
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = sorted(name for name in there - OURS - OF_SYSTEMS if not name.startswith("."))
    begun = layout.LISTING in there or (INCOMING in there and _is_ours(incoming))
    if foreign or (there & OURS and not held and not begun):
        what = foreign[0] if foreign else "something like an image"
        raise UsageError(
            f"{folder} isn't empty: it has {what} in it",
            "Name a folder for this image alone; it is made where there is none.",
        )
    if there & OURS and not files.is_ours(folder):
        raise UsageError(
            f"{folder} has an image's files in it, and no save of this launcher has made it",
            "Name another folder, or remove this one.",
        )
    if not folder.exists():
        files.make_folder(folder)
    elif not files.is_ours(folder):
        files.mark(folder)
    for each in (INCOMING, *FOLDERS):
        files.real_folder(folder / each, folder, make=False)
    if not incoming.exists():
        files.make_folder(incoming)
    with parts.named(incoming / NAMES):
        files.write(incoming / NAMES, layout.compact(known))
    return incoming


def _known_in(folder: Path) -> list[str]:
    """Names and ID of the image that was, or was to be, saved there; none where none can be told.

    A complete one's ID is that of its configuration, which engines with containerd's store don't
    know it by: there its names alone tell.
    """
    with suppress(OSError):
        if listing := layout.parse(parts.whole(folder, layout.LISTING, layout.LARGEST_LISTING)):
            return [*listing.names, listing.image]
    with suppress(OSError, ValueError):
        names = parts.whole(folder, f"{INCOMING}/{NAMES}", layout.LARGEST)
        return TypeAdapter(list[str]).validate_json(names)
    return []


def _is_ours(incoming: Path) -> bool:
    """Whether all that is in there is named as a save names it, which may not be all written."""
    ours = rf"[0-9a-f]{{64}}(\.\d{{4,}})?|{NAMES}|\.{NAMES}\..*|{re.escape(files.MARKER)}"
    return files.is_ours(incoming) and all(
        re.fullmatch(ours, path.name) for path in incoming.iterdir()
    )


def _packed_in(folder: Path, image: Image) -> dict[str, str]:
    """The blob of each layer that an earlier save packed, by diff ID, from the manifests there.

    Where no manifest can be read, what can't be told apart any more makes room.
    """
    blobs = list((folder / layout.BLOBS).glob("*"))
    found: dict[str, str] | None = None
    for path in blobs:
        with suppress(OSError, ValueError):
            manifest = parts.whole(folder, f"{layout.BLOBS}/{path.name}", layout.LARGEST)
            packed = Manifest.model_validate_json(manifest).unpacked()
            found = (found or {}) | {diff_id: digest for digest, diff_id in packed.items()}
    if found is None:
        known = set(map(hex_of, image.layers))
        for path in (*blobs, *(folder / layout.PARTS).glob("*")):
            if path.name.partition(".")[0] not in known:
                files.remove_file(path, folder)
    return found or {}


def _take_back(
    member: Member, folder: Path, incoming: Path, there: Mapping[str, str], taken: set[str]
) -> str:
    """The name for a blob's files while they come, whose digest may not be known yet.

    Files of it that an earlier save completed are moved there, to be compared; `there` has the
    digests of what it packed. `taken` are the names that this save has given so far.
    """
    name = hex_of(member.guess or "")
    if not name or name in taken:  # a guess may be wrong
        name = hex_of(layout.sha256(member.name.encode()))
    taken.add(name)
    digest = there.get(f"sha256:{name}", name)
    whole = folder / layout.blob_path(digest)
    if whole.exists():
        whole.replace(incoming / f"{name}.0001")
    for part in (folder / layout.PARTS).glob(f"{hex_of(digest)}.*"):
        part.replace(incoming / f"{name}{part.suffix}")
    return name


@contextmanager
def _shown(progress: Progress, member: Member) -> Iterator[parts.Seen]:
    """A step for a layer, with how much of it is done; nothing for a small file."""
    if not member.name.endswith("layer.tar") and member.size < parts.BLOCK:
        yield lambda _: None
        return
    label = hex_of(member.diff_id or member.guess or member.name)[:12]
    with counted(progress, f"save layer {label}", member.size) as seen:
        yield seen


def _packing(file: io.BufferedReader) -> str | None:
    """How a blob's media type tells that it comes packed, as from engines with containerd's store.

    Nothing for a configuration, which stays as it is, and None for a layer that isn't packed.
    """
    head = file.peek(4)
    if head.lstrip().startswith(b"{"):
        return ""
    return next((name for magic, name in _PACKED.items() if head.startswith(magic)), None)


def _check(image: Image, layers: list[Layer]) -> None:
    """Refuse a layer that isn't the one that the image's configuration names."""
    for diff_id, layer in zip(image.layers, layers, strict=True):
        came = layer.unpacked or layer.digest
        if came != diff_id and (layer.unpacked or layer.media_type == layout.LAYER_TYPE):
            raise EngineError(
                f"{image.id}: the engine gave a layer with the sha256 {came}, "
                f"and the image's is {diff_id}",
                "The engine's store is damaged: remove the image and build or pull it again.",
            )


def _complete(
    folder: Path,
    image: Image,
    base: Base | None,
    config: Blob,
    layers: list[Layer],
    carried: list[Blob],
    documents: Mapping[str, bytes],
) -> Listing:
    """Put everything in its place, remove what belongs to no blob, and list the files.

    The manifest comes before the blobs in it: by it the next save finds them, whatever stops this.
    """
    value = b"".join(parts.joined([piece.path for piece in config.pieces]))
    manifest = layout.manifest(value, layers)
    made = {
        layout.MARKER: layout.marker(),
        layout.blob_path(layout.sha256(manifest)): manifest,
        layout.INDEX: layout.index(manifest, json.loads(value), image.names),
        **{f"{layout.DOCUMENTS}/{name}": content for name, content in documents.items()},
    }
    listed: dict[str, File] = {}
    split: dict[str, tuple[str, ...]] = {}
    for path, content in made.items():
        _write(folder / path, content)
        listed[path] = File(path=path, size=len(content), sha256=hex_of(layout.sha256(content)))
    for blob in carried:
        placed = blob.place(folder)
        listed |= {file.path: file for file in placed}
        if len(placed) > 1:
            split[blob.digest] = tuple(file.path for file in placed)
    listing = Listing(
        format=1,
        names=image.names,
        image=config.digest,
        manifest=layout.sha256(manifest),
        base=base,
        files=tuple(listed[path] for path in sorted(listed)),
        split=dict(sorted(split.items())),
    )
    for each in FOLDERS:
        if (folder / each).exists():
            files.sync(folder / each)
    _write(folder / layout.SUMS, layout.sums(listing))
    _write(folder / layout.LISTING, layout.render(listing))
    for there in chain.from_iterable(folder.glob(f"{one}/*") for one in FOLDERS):
        if there.relative_to(folder).as_posix() not in listed:
            files.remove_file(there, folder)
    return listing


def _write(path: Path, content: bytes) -> None:
    """Write a small file, unless it has these bytes."""
    with suppress(OSError):
        if path.read_bytes() == content:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    with parts.named(path):
        files.write(path, content)
