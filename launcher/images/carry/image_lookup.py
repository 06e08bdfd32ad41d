"""Finds the image in an engine that a name means, and the one that it is built on."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launcher.base.errors import EngineError, UsageError
from launcher.base.names import LABEL
from launcher.base.reference import parse_reference
from launcher.images.builder.verify import is_ours
from launcher.images.oci.inspection import find_image, layers_of, tags_of
from launcher.images.oci.oci_layout import DIGEST, BaseImage

if TYPE_CHECKING:
    from docker import DockerClient

REPOSITORY = "megatron"
BASE_NAME = "org.opencontainers.image.base.name"


@dataclass(frozen=True)
class EngineImage:
    """An image of the engine.

    names: the one that was asked for first, then the others of the same repository
    layers: diff IDs, lowest first; digests: as registries name it
    """

    id: str
    names: tuple[str, ...]
    layers: tuple[str, ...]
    digests: tuple[str, ...]
    labels: Mapping[str, str]


def reference(text: str, rows: Mapping[str, object]) -> str:
    """The name of an image: `24.10` of the matrix is `megatron:24.10`, another is a name itself."""
    if any(text == row or text.startswith(f"{row}-") for row in rows):  # 24.10, 24.10-0.9.0
        return f"{REPOSITORY}:{text}"
    if re.fullmatch(r"[0-9a-f]{12,64}", text):  # an ID, as `image build` prints it
        return text
    asked = parse_reference(text)
    return text if asked.tag or asked.digest else f"{text}:latest"


def digest(text: str) -> str:
    """A digest that a user gave. Raises UsageError for what is none."""
    whole = text if text.startswith("sha256:") else f"sha256:{text}"
    if not re.fullmatch(DIGEST, whole):
        raise UsageError(f"{text!r} isn't a digest", "It is sha256: and 64 hexadecimal digits.")
    return whole


def find(client: DockerClient, name: str) -> EngineImage:
    """The image of this name. Raises EngineError where the engine has none."""
    found = find_image(client, name)
    if found is None:
        how = f"docker pull {name}"
        if ours := re.fullmatch(rf"{REPOSITORY}:(.+?)(?:-(\d+\.\d+\.\d+))?", name):
            how = f"make image TAG={ours[1]}" + (f" MEGATRON={ours[2]}" if ours[2] else "")
        raise EngineError(f"the engine has no image {name}", how)
    asked = parse_reference(name)
    there = map(parse_reference, sorted(found["RepoTags"] or []))
    tags = [one.tag for one in there if one.in_full == asked.in_full]
    others = [tag for tag in tags if tag != asked.target]
    own = [asked.target, *others] if asked.target in tags else []
    return _image(found, tuple(f"{asked.name}:{tag}" for tag in own))


def _image(found: Mapping[str, Any], names: tuple[str, ...]) -> EngineImage:
    return EngineImage(
        id=found["Id"],
        names=names,
        layers=layers_of(found),
        digests=tuple(sorted(found.get("RepoDigests") or ())),
        labels=(found.get("Config") or {}).get("Labels") or {},
    )


def base_of(
    client: DockerClient, image: EngineImage, rows: Mapping[str, Any], chosen: str | None = None
) -> BaseImage:
    """What `image` has in common with `chosen`, else with the base it was built on.

    In a row with packages of its own those count as the base's: any image of the row that was
    built with the same packages has them. Else the base is found by its name, in the image's label
    or in its row of the matrix, or it is any other image of which all layers are in this one.
    Raises EngineError where there's none.
    """
    if chosen is not None:
        return _common(image, find(client, chosen))
    row = rows.get(image.labels.get(f"{LABEL}row", ""))
    if row and row.packages and is_ours(client.api.history(image.id)):
        return BaseImage(
            name=_name(image), id=image.id, digests=image.digests, layers=image.layers[:-1]
        )
    for name in _base_names(image, rows):
        found = find_image(client, name)
        if found and _shared(image, base := _image(found, (name,))) == len(base.layers):
            return _common(image, base)
    wholes = [one for one in _named(client) if 0 < _shared(image, one) == len(one.layers)]
    wholes = [one for one in wholes if f"{LABEL}row" not in one.labels and one.id != image.id]
    if not wholes:
        names = ", ".join(_base_names(image, rows)) or "its base"
        raise EngineError(
            f"{_name(image)}: the engine doesn't have the image that it was built on: {names}",
            "Pull that, name an image with the same layers by --base, or save without --thin.",
        )
    return _common(image, max(wholes, key=lambda one: len(one.layers)))


def having(client: DockerClient, base: BaseImage) -> EngineImage | None:
    """An image of the engine that has the layers of `base`, or None."""
    count = len(base.layers)
    by_name = [one for name in (base.id, base.name) if (one := find_image(client, name))]
    images = [*(_image(one, ()) for one in by_name), *_named(client)]
    return next((one for one in images if one.layers[:count] == base.layers), None)


def id_of(client: DockerClient, name: str) -> str | None:
    """The ID of the image of this name, or None."""
    found = find_image(client, name)
    return found["Id"] if found else None


def _base_names(image: EngineImage, rows: Mapping[str, Any]) -> list[str]:
    row = rows.get(image.labels.get(f"{LABEL}row", ""))
    names = [image.labels.get(BASE_NAME), row.base if row else None]
    return list(dict.fromkeys(filter(None, names)))


def _named(client: DockerClient) -> Iterator[EngineImage]:
    """All images of the engine that have a name."""
    for one in client.api.images():
        names = tags_of(one)
        found = find_image(client, one["Id"]) if names else None
        if found:
            yield _image(found, tuple(sorted(names)))


def _shared(image: EngineImage, other: EngineImage) -> int:
    """How many layers two images have in common, from the lowest."""
    return len(os.path.commonprefix([image.layers, other.layers]))  # noqa: RUF071 - no text


def _common(image: EngineImage, other: EngineImage) -> BaseImage:
    count = _shared(image, other)
    if not count or image.id == other.id:
        why = "has no layer of it" if not count else "is the same image"
        raise EngineError(
            f"{_name(other)} can't be the base of {_name(image)}: it {why}",
            "Name the image that the other side has by --base, or save without --thin.",
        )
    return BaseImage(
        name=_name(other), id=other.id, digests=other.digests, layers=image.layers[:count]
    )


def _name(image: EngineImage) -> str:
    return image.names[0] if image.names else image.id
