"""Gives a saved image to an engine: checked first, joined on the fly, named last."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.errors import EngineError
from launcher.progress import Progress
from launcher.transfer import images, layout, packed, parts, saved
from launcher.transfer.check import Fault, check, damaged, read_listing, unreadable
from launcher.transfer.images import Image
from launcher.transfer.layout import Base, File, Listing
from launcher.transfer.saved import Saved, hex_of
from launcher.transfer.shown import counted

if TYPE_CHECKING:
    from docker import DockerClient

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Loaded:
    """An image that is in the engine now; `moved` are the names that another image had before.

    documents: what was saved with it, by name; none where the engine gave it another ID
    """

    id: str
    names: tuple[str, ...]
    moved: tuple[str, ...]
    documents: Mapping[str, bytes]


@dataclass(frozen=True)
class _Content:
    """A checked layout: its list, the configuration, and the digests of all layers in order.

    packed: those of layers that `save` packed
    """

    folder: Path
    listing: Listing
    config: bytes
    layers: tuple[str, ...]
    packed: frozenset[str]

    @property
    def diff_ids(self) -> tuple[str, ...]:
        return tuple(json.loads(self.config)["rootfs"]["diff_ids"])


def load(client: DockerClient, folder: Path, progress: Progress) -> Loaded:
    """Load the image saved in `folder` and give it its names.

    Raises UsageError or DamagedError where files are damaged, EngineError where the base of a thin
    image is missing or the engine refuses; then nothing is loaded and no name is moved.
    """
    listing = read_listing(folder)
    base = _base(client, listing.base, listing) if listing and listing.base else None
    content = _content(folder, check(folder, progress))
    loaded = _give(client, content, base, progress)
    _check(client, content, loaded)
    documents = _documents(content) if loaded == content.listing.image else {}
    return Loaded(loaded, content.listing.names, _name(client, loaded, content), documents)


def _base(client: DockerClient, wanted: Base, listing: Listing) -> Image:
    """An image with the layers that are left out. Raises EngineError where the engine has none."""
    found = images.having(client, wanted)
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
            f"Get it first: docker pull {registry}\n  or carry it over: python3 -m launcher image "
            f"save {wanted.name} -o FOLDER there, image load FOLDER here.",
        )
    return found


def _content(folder: Path, listing: Listing) -> _Content:
    manifest = (folder / layout.blob_path(listing.manifest)).read_bytes()
    config = b"".join(parts.joined([folder / path for path in listing.paths(listing.image)]))
    layers = tuple(layer["digest"] for layer in json.loads(manifest)["layers"])
    return _Content(folder, listing, config, layers, frozenset(layout.unpacked(manifest)))


def _give(client: DockerClient, content: _Content, base: Image | None, progress: Progress) -> str:
    """Stream the image to the engine; the ID that it got there.

    An engine with the overlay2 store takes a stream without the layers that it has. One that
    doesn't is given the base's again, as it gives them itself.
    """
    try:
        return _stream(client, content, _archive(content, progress), progress)
    except EngineError as refused:
        if base is None or "no space left" in str(refused):
            raise
        progress.note("this engine wants the base's layers as well: they are read from it")
        return _stream(client, content, _whole_archive(client, content, base, progress), progress)


def _stream(
    client: DockerClient, content: _Content, archive: Iterator[bytes], progress: Progress
) -> str:
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    said = []
    try:
        for event in client.api.load_image(archive, quiet=True):
            if "error" in event:
                raise _refused(event["error"])
            said.append(str(event.get("stream", "")))
    except (DockerException, RequestException) as error:
        raise _refused(getattr(error, "explanation", None) or error) from error
    finally:
        progress.close()
    named = re.search(rf"Loaded image ID: ({layout.DIGEST})", "".join(said))
    return named[1] if named else content.listing.image


def _refused(reason: object) -> EngineError:
    full = "no space left" in str(reason)
    return EngineError(
        f"the engine refused the image: {reason}",
        "Free some of the engine's disk: docker system df." if full else "",
    )


def _archive(content: _Content, progress: Progress) -> Iterator[bytes]:
    """What `docker load` reads, with the layers that the folder has."""
    yield from _layers(content, progress)
    names = [_member(digest) for digest in content.layers]
    yield from _end(content, names, progress)


def _whole_archive(
    client: DockerClient, content: _Content, base: Image, progress: Progress
) -> Iterator[bytes]:
    """The same, with the base's layers out of the engine's own stream of the base."""
    count = len(content.listing.base.layers) if content.listing.base else 0
    with saved.told((*base.names, base.id)[0], "Load it again. The engine's own disk may be full."):
        stream = Saved(client.api.get_image(base.id, chunk_size=parts.BLOCK), base.layers)
        for member, file in stream.members():
            with counted(progress, f"read {member.name[:12]} of the base", member.size) as seen:
                yield saved.header(member.name, member.size)
                while block := file.read(parts.BLOCK):
                    seen(len(block))
                    yield block
                yield saved.padding(member.size)
        below = stream.layers()[:count]
    yield from _layers(content, progress)
    names = below + [_member(digest) for digest in content.layers[count:]]
    yield from _end(content, names, progress)


def _layers(content: _Content, progress: Progress) -> Iterator[bytes]:
    listed = {file.path: file for file in content.listing.files}
    for digest in dict.fromkeys(content.layers):
        files = [listed[path] for path in content.listing.paths(digest)]
        if not files:
            continue
        size = sum(file.size for file in files)
        with counted(progress, f"load layer {hex_of(digest)[:12]}", size) as seen:
            read = (_read(content.folder, file, seen) for file in files)
            blocks: Iterator[bytes] = chain.from_iterable(read)
            if digest in content.packed:
                size, blocks = packed.unpack(digest, blocks)
            yield saved.header(_member(digest), size)
            yield from blocks
            yield saved.padding(size)


def _read(folder: Path, file: File, seen: parts.Seen) -> Iterator[bytes]:
    """The bytes of a file that was checked; DamagedError where it can't be read any more.

    An OSError would be taken for the engine's, to which these bytes are on their way.
    """
    try:
        yield from parts.joined([folder / file.path], seen)
    except OSError as error:
        raise damaged(folder, [Fault(file.path, file.sha256, unreadable(error))]) from error


def _end(content: _Content, layers: list[str], progress: Progress) -> Iterator[bytes]:
    config = f"{hex_of(content.listing.image)}.json"
    yield saved.file(config, content.config)
    yield saved.file(MANIFEST, saved.load_manifest(config, layers))
    yield saved.END
    progress.step("the engine unpacks it")


def _member(digest: str) -> str:
    return f"{hex_of(digest)}/layer.tar"


def _check(client: DockerClient, content: _Content, loaded: str) -> None:
    """The engine has the image that was saved. One that is another is removed again."""
    from docker.errors import APIError

    found = client.api.inspect_image(loaded)
    same = tuple(found["RootFS"].get("Layers") or ()) == content.diff_ids
    if same and (found["Id"] == content.listing.image or _names_by_manifest(client)):
        return
    with suppress(APIError):
        client.api.remove_image(loaded)
    raise EngineError(
        f"the engine made another image of it: {found['Id']}, and {content.listing.image} was saved"
    )


def _names_by_manifest(client: DockerClient) -> bool:
    """True for containerd's store, whose IDs are digests of manifests that it makes itself."""
    status: list[list[Any]] = client.info().get("DriverStatus") or []
    return ["driver-type", "io.containerd.snapshotter.v1"] in status


def _name(client: DockerClient, loaded: str, content: _Content) -> tuple[str, ...]:
    """Give the image its names; those that another image had."""
    moved = []
    for name in content.listing.names:
        before = images.id_of(client, name)
        if before not in (None, loaded):
            moved.append(name)
        repository, _, tag = name.rpartition(":")
        client.api.tag(loaded, repository, tag)
    return tuple(moved)


def _documents(content: _Content) -> dict[str, bytes]:
    paths = [file.path for file in content.listing.files]
    there = [path for path in paths if path.startswith(f"{layout.DOCUMENTS}/")]
    return {path.rpartition("/")[2]: (content.folder / path).read_bytes() for path in there}
