"""The door to an engine's images and containers: what one is, its names, and files out of it."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import IO, TYPE_CHECKING, Any, cast

from launcher.errors import UsageError
from launcher.oci.parts import Stream, blocks_of
from launcher.reference import parse_reference

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container


def engine_errors(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """What docker's client raises where an engine refuses, is late, or isn't there; and `more`."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException

    return DockerException, RequestException, *more


@contextmanager
def answer_within(client: DockerClient, seconds: float) -> Iterator[None]:
    """Other seconds than usual for each answer of an engine."""
    usual, client.api.timeout = client.api.timeout, seconds
    try:
        yield
    finally:
        client.api.timeout = usual


def find_image(client: DockerClient, name: str) -> dict[str, Any] | None:
    """What an engine says of an image; None where it has none of that name.

    Raises UsageError for what is no image's name to it.
    """
    from docker.errors import APIError, NotFound

    try:
        found: dict[str, Any] = client.api.inspect_image(name)
    except NotFound:
        return None
    except APIError as error:
        raise UsageError(f"{name}: not an image's name: {error.explanation}") from error
    return found


def tags_of(told: Mapping[str, Any]) -> list[str]:
    """The names with a tag of an image, as an engine tells of it."""
    return [name for name in told.get("RepoTags") or [] if name != "<none>:<none>"]


def layers_of(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """The diff IDs of an image's layers, lowest first."""
    return tuple(inspected["RootFS"].get("Layers") or ())


def name_image(client: DockerClient, id: str, *names: str) -> None:
    """Give an image of an engine these names, whatever had them before."""
    for name in map(parse_reference, names):
        client.api.tag(id, name.name, name.target)


@contextmanager
def container_of(
    client: DockerClient, image: str, *command: str, **how: Any
) -> Iterator[Container]:
    """A container of an image, without a network, for as long as this lasts; it isn't started."""
    container = client.containers.create(image, command or ["true"], network_mode="none", **how)
    try:
        yield container
    finally:
        container.remove(force=True, v=True)


def copy_out(container: Container, path: str, to: IO[bytes], most: int | None = None) -> bool:
    """Copy a regular file out of a container; whether there is one.

    Raises ValueError for one of more than `most` bytes, tarfile.TarError where the engine gives
    something else than a tar.
    """
    from docker.errors import NotFound

    try:
        chunks, _ = container.get_archive(path)
    except NotFound:
        return False
    with (
        closing(chunks),
        tarfile.open(fileobj=cast(IO[bytes], Stream(iter(chunks))), mode="r|") as tar,
    ):
        member = tar.next()
        content = tar.extractfile(member) if member and member.isreg() else None
        if member is None or content is None:
            return False
        if most is not None and member.size > most:
            raise ValueError(f"it has more than {most} bytes")
        to.writelines(blocks_of(content))
    return True
