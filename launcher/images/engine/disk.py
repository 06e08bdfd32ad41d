"""Measures the disk space of an engine's images and of BuildKit's cache.

BuildKit's cache holds the layers of every image that something was built on. Removing that image
frees nothing until they go from the cache as well (seen with Docker 20.10: overlay2 kept 191 MB of
a removed base of 200 MB until then).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from launcher.images.oci.inspection import answer_within, engine_errors

if TYPE_CHECKING:
    from docker import DockerClient

PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each try."""
ANSWER_WITHIN = 60
"""Seconds that an engine has for each answer: it adds up what all its images take."""


def used(client: DockerClient) -> int | None:
    """Bytes of all layers of images, each once; None where the engine doesn't say it, just now."""
    told = (_told(client) or {}).get("LayersSize")
    return None if told is None else int(told)


def cached(client: DockerClient) -> dict[str, Mapping[str, Any]] | None:
    """BuildKit's records, by ID, of what it keeps and no image has: steps, and removed images.

    None where the engine doesn't say it, just now.
    """
    told = _told(client)
    if told is None:
        return None
    return {one["ID"]: one for one in told.get("BuildCache") or () if not one["Shared"]}


def _told(client: DockerClient) -> Mapping[str, Any] | None:
    """What the engine says of its disk; None where it refuses, is away, or takes too long."""
    from docker.errors import APIError

    with suppress(*engine_errors()), answer_within(client, ANSWER_WITHIN):
        for pause in PAUSES:  # it answers one such question at a time
            time.sleep(pause)
            with suppress(APIError):
                told: Mapping[str, Any] = client.df()
                return told
    return None
