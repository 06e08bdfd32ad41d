"""The disk that images take in an engine, and layers that BuildKit keeps of images that are gone.

BuildKit's cache holds the layers of every image that something was built on. Removing that image
frees nothing until its record in the cache goes, and those of what was built on it (seen with
Docker 20.10: overlay2 kept 191 MB of a removed base of 200 MB until then).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from docker import DockerClient

IMAGES = ("from local", "pulled from")
"""How BuildKit's records of images begin; one for each layer."""
PAUSES = (0.0, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Seconds before each try."""
ANSWER_WITHIN = 60
"""Seconds that an engine has for each answer: it adds up what all its images take."""


def used(client: DockerClient) -> int | None:
    """Bytes of all layers of images, each once; None where the engine doesn't say it, just now."""
    told = (_told(client) or {}).get("LayersSize")
    return None if told is None else int(told)


def cached(client: DockerClient) -> int | None:
    """Bytes that BuildKit keeps and no image has: steps of builds, and layers of removed images.

    None where the engine doesn't say it, just now.
    """
    records = _records(client)
    if records is None:
        return None
    return sum(int(one["Size"]) for one in records if not one["Shared"])


def held(client: DockerClient) -> set[str] | None:
    """The IDs of BuildKit's records of images that the engine doesn't have any more.

    None where the engine doesn't say it, just now.
    """
    records = _records(client)
    if records is None:
        return None
    return {one["ID"] for one in records if _is_image(one) and not one["Shared"]}


def let_go(client: DockerClient, wanted: Iterable[str]) -> set[str]:
    """Have BuildKit forget these records, and before each what was built on it; what may stay.

    BuildKit takes a moment to see that nothing lies on a record any more.
    """
    from docker.errors import APIError

    left = set(wanted)
    for pause in PAUSES:
        time.sleep(pause)
        for one in _leaves_first(_records(client) or (), left):
            with suppress(APIError):  # a build uses it just now
                client.api.prune_builds(filters={"id": [one]})
        there = held(client)
        if there is None or not (left := left & there):
            break
    return left


def _records(client: DockerClient) -> list[Mapping[str, Any]] | None:
    """What BuildKit keeps; None where the engine doesn't say it, just now."""
    told = _told(client)
    return None if told is None else list(told.get("BuildCache") or [])


def _told(client: DockerClient) -> Mapping[str, Any] | None:
    """What the engine says of its disk; None where it refuses, is away, or takes too long."""
    from docker.errors import APIError, DockerException
    from requests.exceptions import RequestException

    patience, client.api.timeout = client.api.timeout, ANSWER_WITHIN
    try:
        for pause in PAUSES:  # it answers one such question at a time
            time.sleep(pause)
            with suppress(APIError):
                told: Mapping[str, Any] = client.df()
                return told
    except (DockerException, RequestException):
        pass
    finally:
        client.api.timeout = patience
    return None


def _is_image(record: Mapping[str, Any]) -> bool:
    return str(record.get("Description", "")).startswith(IMAGES)


def _leaves_first(records: Iterable[Mapping[str, Any]], wanted: set[str]) -> Iterator[str]:
    """`wanted` and all above them, each after what lies on it; from API 1.42 there are Parents."""
    children: dict[str, list[str]] = {}
    for one in records:
        for parent in one.get("Parents") or [one.get("Parent")]:
            children.setdefault(parent or "", []).append(one["ID"])
    done: set[str] = set()

    def walk(record: str) -> Iterator[str]:
        if record in done:
            return
        done.add(record)
        for child in children.get(record, ()):
            yield from walk(child)
        yield record

    for record in sorted(wanted):
        yield from walk(record)
