"""Finds images in an engine that were built here and that nothing needs, and their size."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import owned
from launcher.base.names import LABEL
from launcher.base.settings import Settings
from launcher.images.builder import beside
from launcher.images.builder.image import OCI
from launcher.images.builder.verify import ADDED, is_ours
from launcher.images.oci.inspection import layers_of
from launcher.images.sources.megatron_source import folder_of

if TYPE_CHECKING:
    from docker import DockerClient

UNNAMED = {"<none>:<none>", "<none>@<none>"}
NEVER = "0001-01-01T"
"""An engine's word for a time that it doesn't have."""
Layers = tuple[str, ...]


@dataclass(frozen=True)
class OwnImage:
    """An image of ours.

    names: tags, and digests that a registry knows it by
    created: as the image says; named: when it last got a name, where the engine keeps that, else
        the same (both ISO 8601)
    layers: digests, lowest first; added: bytes of each that is ours, the last ones of them
    size: bytes of all layers; used: a container was made from it
    """

    id: str
    names: tuple[str, ...]
    row: str
    release: str
    created: str
    named: str
    layers: Layers
    added: tuple[int, ...]
    size: int
    pinned: bool
    used: bool

    @property
    def tags(self) -> tuple[str, ...]:
        """The names with a tag."""
        return tuple(name for name in self.names if "@" not in name)


def ours(client: DockerClient) -> list[OwnImage]:
    """The images that `image build` made, by row and release, the last named first.

    An image that somebody made from one of them has its labels too, and isn't among them.
    """
    used = {container["ImageID"] for container in client.api.containers(all=True)}
    found = []
    for entry in client.api.images(filters={"label": f"{LABEL}key"}):
        inspected = client.api.inspect_image(entry["Id"])
        history = client.api.history(entry["Id"])
        if is_ours(history):
            found.append(_image(inspected, history, entry["Id"] in used))
    found.sort(key=lambda image: image.named, reverse=True)
    return sorted(found, key=lambda image: (image.row, image.release))


def to_prune(images: Sequence[OwnImage], all_of_them: bool, keep: int) -> list[OwnImage]:
    """Those without a tag, or all of them, that no container uses; `images` as from `ours`.

    Of each row and release the first `keep` stay, whatever they are.
    """
    chosen = []
    for _, group in groupby(images, key=lambda image: (image.row, image.release)):
        chosen += list(group)[keep:]
    return [image for image in chosen if not image.used and (all_of_them or not image.tags)]


def freed(images: Sequence[OwnImage], others: Iterable[Layers]) -> int:
    """The bytes of layers that no image has but `images`; `others` are the layers of the rest."""
    kept = {layers[:depth] for layers in others for depth in range(1, len(layers) + 1)}
    gone: dict[Layers, int] = {}
    for image in images:
        base = len(image.layers) - len(image.added)
        sizes = {image.layers[:base]: image.size - sum(image.added)}
        sizes |= {image.layers[: base + n]: size for n, size in enumerate(image.added, 1)}
        gone |= {chain: size for chain, size in sizes.items() if chain not in kept}
    return sum(gone.values())


def rest(client: DockerClient, images: Iterable[OwnImage]) -> list[Layers]:
    """The layers of all images in the engine but `images`."""
    gone = {image.id for image in images}
    ids = {entry["Id"] for entry in client.api.images()} - gone
    return [layers_of(client.api.inspect_image(one)) for one in sorted(ids)]


def remove(client: DockerClient, image: OwnImage, site: Settings) -> str:
    """Remove an image and what lies beside it; why it stays where the engine keeps it, or "".

    It is never forced: a container that was made from it meanwhile keeps it, and so does a build
    that gave it a name, or its name to another image.
    """
    from docker.errors import APIError, ImageNotFound

    for name in image.names or (image.id,):
        try:
            found = client.api.inspect_image(name)
            if found["Id"] != image.id or {*(found["RepoTags"] or ())} - {*image.names} - UNNAMED:
                return "names were given meanwhile"
            client.api.remove_image(name)
        except ImageNotFound:
            continue  # its last tag took the digests with it, or somebody else did
        except APIError as error:
            return str(error.explanation or error)
    beside.remove(image.id, site)
    return ""


def downloads(site: Settings, locked: Iterable[str], urls: Iterable[str]) -> list[Path]:
    """Folders of the cache with a file, by its sha256, or a repository that no lock mentions.

    Also what a launcher that was killed left of its downloads, a day later.
    """
    kept = {site.cache / "sha256" / digest for digest in locked}
    kept |= {folder_of(url, site) for url in urls}
    there = [*(site.cache / "sha256").glob("*"), *(site.cache / "git").glob("*")]
    yesterday = time.time() - 24 * 3600
    scratch = site.cache.glob(f"{owned.SCRATCH}*")
    left = [path for path in scratch if path.stat().st_mtime < yesterday]
    return sorted({*there, *left} - kept)


def title(folder: Path) -> str:
    """What a folder of the cache has: the name of a download, else the folder's own."""
    if folder.parent.name != "sha256":
        return folder.name
    names = (path.name for path in folder.iterdir() if path.name != owned.MARKER)
    return next(names, folder.name)


def bytes_in(folder: Path) -> int:
    """The bytes of all files in a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())


def _image(inspected: dict[str, Any], history: list[dict[str, Any]], used: bool) -> OwnImage:
    labels = inspected["Config"].get("Labels") or {}
    tags, digests = inspected.get("RepoTags") or [], inspected.get("RepoDigests") or []
    named = (inspected.get("Metadata") or {}).get("LastTagTime") or NEVER
    return OwnImage(
        id=inspected["Id"],
        names=tuple(name for name in [*sorted(tags), *sorted(digests)] if name not in UNNAMED),
        row=labels.get(f"{LABEL}row", ""),
        release=labels.get(f"{LABEL}megatron", ""),
        created=inspected["Created"],
        named=inspected["Created"] if named.startswith(NEVER) else named,
        layers=layers_of(inspected),
        added=tuple(
            entry["Size"] for entry in reversed(history) if ADDED.search(entry["CreatedBy"] or "")
        ),
        size=inspected["Size"],
        pinned=f"{OCI}base.digest" in labels,
        used=used,
    )
