"""Replaces build timestamps in an image by the source's time.

BuildKit reads SOURCE_DATE_EPOCH from version 0.11 on (Docker 23). An older one writes the time of
the build into the image's configuration, so that its ID is another at every build, with the same
layers in it. The configuration is written anew then, and loaded into the engine without a layer:
it has them all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.images.oci.archive import archive, entry, layer_name, load_archive
from launcher.images.oci.blocks import blocks_of, sha256_of
from launcher.images.oci.inspection import find_image
from launcher.images.oci.oci_layout import compact, sha256

if TYPE_CHECKING:
    from docker import DockerClient

SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Steps that make no layer, as BuildKit and as the classic builder write them into a history.
NO_LAYER = re.compile(
    r"(/bin/sh -c #\(nop\) +)?"
    r"(ARG|CMD|ENTRYPOINT|ENV|EXPOSE|HEALTHCHECK|LABEL|MAINTAINER|ONBUILD|SHELL|STOPSIGNAL"
    r"|USER|VOLUME)\b"
)


def settle(client: DockerClient, image: str, base: str, epoch: int) -> str:
    """The ID of the same image with `epoch` for the time of its build, in place of `image`.

    base: the image that it was built on, whose history keeps its times. `image` itself is returned
    where it has that time, where its configuration isn't known exactly, and by an engine that
    doesn't name images by their configuration. Raises docker's errors and EngineError.
    """
    from docker.errors import ImageNotFound

    found = client.api.inspect_image(image)
    if found["Created"].startswith(iso(epoch)[:19]):
        return image
    history = client.api.history(image)
    layered = with_layers(history, len(found["RootFS"]["Layers"]))
    if layered is None:
        return image
    own = len(history) - len(client.api.history(base))
    content = configuration(found, history, layered, own, epoch)
    settled = sha256(content)
    load_archive(client, archive(content, [*map(layer_name, found["RootFS"]["Layers"])]))
    if find_image(client, settled) is None:
        return image
    if not found["RepoTags"]:
        with suppress(ImageNotFound):  # another build that made the same one has removed it
            client.api.remove_image(image)
    return settled


def with_layers(history: Sequence[dict[str, Any]], layers: int) -> list[bool] | None:
    """For each step of a history, whether it made a layer; None where that isn't known.

    The engine reports the size of each step, and a step without size may have made an empty layer.
    """
    made = [step["Size"] > 0 for step in history]
    if sum(made) < layers:
        made = [step["Size"] > 0 or not NO_LAYER.match(step["CreatedBy"]) for step in history]
    return made if sum(made) == layers else None


def configuration(
    found: dict[str, Any],
    history: Sequence[dict[str, Any]],
    layered: Sequence[bool],
    own: int,
    epoch: int,
) -> bytes:
    """An image's configuration, by the OCI image specification, from an engine's answer.

    history: newest first; the first `own` steps are the build's and get `epoch` for their time
    """
    steps = []
    for place, (step, made) in enumerate(zip(history, layered, strict=True)):
        entry = {
            "created": iso(epoch if place < own else step["Created"]),
            "created_by": step["CreatedBy"],
            "comment": step["Comment"],
        }
        entry = {key: value for key, value in entry.items() if value}
        steps.append(entry if made else {**entry, "empty_layer": True})
    platform = {key.lower(): found.get(key) for key in ("Author", "Architecture", "Variant", "Os")}
    return compact(
        {
            **{key: value for key, value in platform.items() if value},
            "created": iso(epoch),
            "config": found["Config"],
            "history": steps[::-1],
            "rootfs": {"type": "layers", "diff_ids": found["RootFS"]["Layers"]},
        }
    )


def iso(seconds: int) -> str:
    """A time since 1970 as images have it: 2026-03-20T21:21:35Z."""
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%S}Z"


def write_image(
    path: Path, layer: Path, epoch: int, labels: Mapping[str, str], architecture: str
) -> str:
    """Write an archive of an image of one layer, a tar; its ID. `docker import` adds the time."""
    with layer.open("rb") as file:
        digest = f"sha256:{sha256_of(blocks_of(file))}"
    created = iso(epoch)
    config = compact(
        {
            "architecture": architecture,
            "os": "linux",
            "created": created,
            "config": {
                "Env": [f"PATH={SEARCH_PATH}"],
                "Cmd": ["/bin/bash"],
                "Labels": dict(labels),
            },
            "history": [
                {"created": created, "created_by": "megatron-launchpad: Debian stand-in base"}
            ],
            "rootfs": {"type": "layers", "diff_ids": [digest]},
        }
    )
    with layer.open("rb") as file, path.open("wb") as target:
        name, size = layer_name(digest), layer.stat().st_size
        target.writelines(archive(config, [name], entry(name, size, blocks_of(file))))
    return sha256(config)
