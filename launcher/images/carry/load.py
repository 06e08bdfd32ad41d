"""Loads a saved image into an engine: checked first, unpacked on the fly, named last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pydantic import BaseModel, ValidationError

from launcher.base.errors import EngineError, UsageError, first_fault
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder import beside
from launcher.images.builder.verify import is_ours
from launcher.images.carry import image_lookup
from launcher.images.carry.check import Damage, DamagedError, check_saved, read_listing, unreadable
from launcher.images.carry.image_lookup import EngineImage
from launcher.images.carry.remote import OtherImageError
from launcher.images.oci import oci_layout, packed, saved
from launcher.images.oci.archive import archive, entry, hex_of, layer_name, load_archive
from launcher.images.oci.blocks import BLOCK, Seen, read_listed, taken
from launcher.images.oci.inspection import layers_of, name_image
from launcher.images.oci.oci_layout import (
    BaseImage,
    Config,
    Descriptor,
    LayoutFile,
    Listing,
    Manifest,
)
from launcher.images.oci.saved import SavedImage

if TYPE_CHECKING:
    from docker import DockerClient

OURS = f"{image_lookup.REPOSITORY}:"
"""How names begin that an image is given without being asked to."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class LoadedImage:
    """An image that is in the engine now, and its names there.

    moved: those of its names that another image had before; left: those that it wasn't given
    documents: what was saved with it, by name; none where the engine gave it another ID
    """

    id: str
    names: tuple[str, ...]
    moved: tuple[str, ...]
    left: tuple[str, ...]
    documents: Mapping[str, bytes]


@dataclass(frozen=True)
class _Content:
    """A checked layout: its list and configuration, its layers and their diff IDs, lowest first."""

    folder: Path
    listing: Listing
    config: bytes
    layers: tuple[Descriptor, ...]
    diff_ids: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """What the layers' tars are called in an archive."""
        return [layer_name(layer.digest) for layer in self.layers]


def load(
    client: DockerClient,
    folder: Path,
    progress: Progress,
    expected: str | None = None,
    all_tags: bool = False,
) -> LoadedImage:
    """Load the image saved in `folder` and give it its names: those of OURS, or `all_tags`.

    Raises UsageError or DamagedError where files are damaged or no image's, or where it would get
    no name; OtherImageError where neither the image nor its manifest is the `expected` digest;
    EngineError where the base of a thin image is missing or the engine refuses; then nothing is
    loaded and no name is moved.
    """
    listing = read_listing(folder)
    if expected not in (None, listing.image, listing.manifest):
        raise OtherImageError(
            f"{folder}: isn't the expected image; nothing was loaded\n"
            f"  expected: {expected}\n"
            f"  there:    {listing.image}, manifest {listing.manifest}",
            "Compare the digest with the one that `image save` printed.",
        )
    names = tuple(name for name in listing.names if all_tags or name.startswith(OURS))
    if listing.names and not names:
        raise UsageError(
            f"{folder}: its image is named {', '.join(listing.names)}, and not {OURS}…",
            "Give it that name with --all-tags, which takes it from an image that has it here.",
        )
    base = _base(client, listing.base, listing) if listing.base else None
    check_saved(folder, progress)
    documents = {
        name: _small(folder, listing.listed[path])
        for name in beside.NAMES
        if (path := f"{oci_layout.DOCUMENTS}/{name}") in listing.listed
    }
    loaded = load_checked(client, folder, listing, progress, base)
    left = tuple(name for name in listing.names if name not in names)
    moved = tuple(name for name in names if image_lookup.id_of(client, name) not in (None, loaded))
    name_image(client, loaded, *names)
    return LoadedImage(loaded, names, moved, left, documents if loaded == listing.image else {})


def load_checked(
    client: DockerClient,
    folder: Path,
    listing: Listing,
    progress: Progress,
    base: EngineImage | None = None,
) -> str:
    """The ID of the image saved in `folder`, each file of which was checked, loaded without a name.

    base: of a thin one, an image of the engine with the layers that are left out
    """
    content = _content(folder, listing)
    before = {image["Id"] for image in client.api.images(all=True)}
    loaded = _give(client, content, base, progress)
    _check(client, content, loaded, new=loaded not in before)
    return loaded


def put_beside(
    client: DockerClient, loaded: LoadedImage, site: Settings, progress: Progress
) -> None:
    """Put beside an image of ours, of what was saved with it, what is about that very image.

    What lies there stays: this machine may have written it.
    """
    if not loaded.documents or not is_ours(client.api.history(loaded.id)):
        return
    try:
        record = beside.record(client, loaded.id, (*loaded.names, loaded.id)[0])
        beside.accept(loaded.documents, loaded.id, record, site)
    except UsageError as error:
        progress.note(f"  {error}")


def _base(client: DockerClient, wanted: BaseImage, listing: Listing) -> EngineImage:
    """An image with the layers that are left out. Raises EngineError where the engine has none."""
    found = image_lookup.having(client, wanted)
    if found is None and (wanted.id == listing.image or wanted.name in listing.names):
        raise EngineError(
            f"{wanted.name} was saved without the layers that it shares with other images of its "
            "row, and the engine has none with them",
            "Save it without --thin there; after that, thin ones of the row can be loaded here.",
        )
    if found is None:
        registry = wanted.digests[0] if wanted.digests else wanted.name
        raise EngineError(
            f"this image was saved without the layers of its base, and the engine has no image "
            f"with them: {wanted.name} ({wanted.id})",
            f"Get it first: docker pull {registry}\n  or carry it over: launcher image "
            f"save {wanted.name} -o FOLDER there, image load --all-tags FOLDER here.",
        )
    return found


def _content(folder: Path, listing: Listing) -> _Content:
    """What is in a folder, each file of which is as it is listed.

    Raises UsageError where that makes no image, or another than is listed.
    """
    manifest = _document(folder, listing, listing.manifest, Manifest)
    diff_ids = _document(folder, listing, listing.image, Config).diff_ids
    below = listing.base.layers if listing.base else ()
    if manifest.config.digest != listing.image:
        raise _no_image(folder, "its manifest is of another image")
    if len(manifest.layers) != len(diff_ids) or below != diff_ids[: len(below)]:
        raise _no_image(folder, "its layers aren't those of its configuration")
    pairs = zip(manifest.layers, diff_ids, strict=True)
    if any(layer.unpacked not in (None, diff_id) for layer, diff_id in pairs):
        raise _no_image(folder, "a layer isn't the one of its configuration")
    return _Content(
        folder=folder,
        listing=listing,
        config=_blob(folder, listing, listing.image),
        layers=manifest.layers,
        diff_ids=diff_ids,
    )


def _document(folder: Path, listing: Listing, digest: str, model: type[Model]) -> Model:
    """A blob of JSON. Raises UsageError for what doesn't fit."""
    try:
        return model.model_validate_json(_blob(folder, listing, digest))
    except ValidationError as error:
        raise _no_image(folder, f"{digest}: {first_fault(error)}") from error


def _blob(folder: Path, listing: Listing, digest: str) -> bytes:
    """The bytes of a small blob. Raises UsageError where it isn't carried, or isn't small."""
    file = listing.blob(digest)
    if file is None:
        raise _no_image(folder, f"{digest} isn't in it")
    return _small(folder, file)


def _small(folder: Path, file: LayoutFile) -> bytes:
    """The bytes of a file of LARGEST at most. Raises UsageError where it is larger."""
    if file.size > oci_layout.LARGEST:
        raise _no_image(folder, f"{file.path} has more than {oci_layout.LARGEST} bytes")
    return b"".join(_read(folder, file))


def _no_image(folder: Path, why: str) -> UsageError:
    return UsageError(
        f"{folder}: isn't an image as `image save` writes it: {why}; nothing was loaded",
        "Save it again where it came from.",
    )


def _give(
    client: DockerClient, content: _Content, base: EngineImage | None, progress: Progress
) -> str:
    """Stream the image to the engine; the ID that it got there.

    An engine with the overlay2 store takes a stream without the layers that it has. One that
    doesn't is given the base's again, as it gives them itself.
    """
    layers = _layers(content, progress)
    try:
        loaded = load_archive(client, archive(content.config, content.names, layers))
    except EngineError as refused:
        if base is None or "no space left" in str(refused):
            raise
        progress.note("this engine wants the base's layers as well: they are read from it")
        loaded = load_archive(client, _whole_archive(client, content, base, progress))
    finally:
        progress.close()
    return loaded


def _whole_archive(
    client: DockerClient, content: _Content, base: EngineImage, progress: Progress
) -> Iterator[bytes]:
    """The archive with the base's layers in it, out of the engine's own stream of the base."""
    count = len(content.listing.base.layers) if content.listing.base else 0
    with saved.stream_errors(
        (*base.names, base.id)[0], "Load it again. The engine's own disk may be full."
    ):
        stream = SavedImage(client.api.get_image(base.id, chunk_size=BLOCK), base.layers)
        for member, file in stream.members():
            with progress.counted(f"read {member.name[:12]} of the base", member.size) as seen:
                yield from entry(member.name, member.size, taken(file, member.size, seen))
        below = stream.layers()[:count]
    names = below + content.names[count:]
    yield from archive(content.config, names, _layers(content, progress))


def _layers(content: _Content, progress: Progress) -> Iterator[bytes]:
    for digest, layer in {layer.digest: layer for layer in content.layers}.items():
        file = content.listing.blob(digest)
        if file is None:
            continue
        size = file.size
        with progress.counted(f"load layer {hex_of(digest)[:12]}", size) as seen:
            blocks = _read(content.folder, file, seen)
            if layer.unpacked:
                size, blocks = packed.unpack(digest, blocks)
            yield from entry(layer_name(digest), size, blocks)
    progress.step("the engine unpacks it")


def _read(folder: Path, file: LayoutFile, seen: Seen = lambda _: None) -> Iterator[bytes]:
    """The bytes of a file that was checked; DamagedError where it can't be read any more.

    An OSError would be taken for the engine's, to which these bytes are on their way.
    """
    try:
        yield from read_listed(folder, file.path, file.size, seen)
    except OSError as error:
        raise DamagedError(folder, [Damage(file.path, file.sha256, unreadable(error))]) from error


def _check(client: DockerClient, content: _Content, loaded: str, new: bool) -> None:
    """The engine has the image that was saved. A `new` one that is another is removed again."""
    from docker.errors import APIError

    found = client.api.inspect_image(loaded)
    same = layers_of(found) == content.diff_ids
    if same and found["Id"] == content.listing.image:
        return
    store = client.info().get("DriverStatus") or []  # containerd's makes manifests, and IDs of them
    if same and ["driver-type", "io.containerd.snapshotter.v1"] in store:
        return
    if new:
        with suppress(APIError):
            client.api.remove_image(loaded)
    raise EngineError(
        f"the engine made another image of it: {found['Id']}, and {content.listing.image} was saved"
    )
