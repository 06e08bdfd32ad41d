"""Asks an engine about images and containers: their ID, names and files."""

from __future__ import annotations

import json
import os
import tarfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from launcher.base import owned
from launcher.base.errors import UsageError
from launcher.base.names import LABEL
from launcher.base.reference import parse_reference
from launcher.images.oci.blocks import ChunkStream, blocks_of

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
    """What an engine says of an image, or None. Raises UsageError for what is no image's name."""
    from docker.errors import APIError, NotFound

    try:
        found: dict[str, Any] = client.api.inspect_image(name)
    except NotFound:
        return None
    except APIError as error:
        raise UsageError(f"{name}: not an image's name: {error.explanation}") from error
    return found


def tags_of(told: Mapping[str, Any]) -> list[str]:
    """The names with a tag of an image, as an engine reports them."""
    return [name for name in told.get("RepoTags") or [] if name != "<none>:<none>"]


def remedy_if_foreign(said: str) -> str:
    """What to do where `said` is that a program is for another processor; else an empty string."""
    if "exec format error" not in said.lower():
        return ""
    return (
        "It is for another processor, and the engine's machine emulates none. As root there:\n"
        "    apt-get install qemu-user-static binfmt-support   (Debian, Ubuntu)\n"
        "    docker run --privileged --rm tonistiigi/binfmt --install all   (others)"
    )


def layers_of(inspected: Mapping[str, Any]) -> tuple[str, ...]:
    """The diff IDs of an image's layers, lowest first."""
    return tuple(inspected["RootFS"].get("Layers") or ())


def name_image(client: DockerClient, id: str, *names: str) -> None:
    """Give an image of an engine these names, whatever had them before."""
    for name in map(parse_reference, names):
        client.api.tag(id, name.name, name.target)


OWNER = f"{LABEL}owner"
"""The label of a container that is there only to look into an image: which process has made it."""


@contextmanager
def container_of(
    client: DockerClient, image: str, *command: str, **how: Any
) -> Iterator[Container]:
    """A container of an image, without a network, for as long as this lasts; it isn't started.

    What killed launchers left of such containers goes first: it would keep an image from removal.
    """
    sweep_containers(client)
    how |= {"network_mode": "none", "labels": {OWNER: json.dumps(_owner())}}
    container = client.containers.create(image, command or ["true"], **how)
    try:
        yield container
    finally:
        container.remove(force=True, v=True)


def sweep_containers(client: DockerClient) -> None:
    """Remove the containers of `container_of` whose process is known to be dead.

    That is known on its own kernel and in its own space of process ids; elsewhere after a day.
    """
    from docker.errors import APIError

    try:
        found = client.api.containers(all=True, filters={"label": OWNER})
    except APIError:
        return
    for one in found:
        with suppress(APIError, ValueError, KeyError, TypeError):
            owner = json.loads(one["Labels"][OWNER])
            if _is_dead(owner, time.time() - int(one["Created"])):
                client.api.remove_container(one["Id"], force=True, v=True)


def _owner(pid: int | str = "self") -> dict[str, Any]:
    """A process as nothing else is: its kernel, its space of ids, its id and when it began."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    space = os.readlink(f"/proc/{pid}/ns/pid")
    return {
        "kernel": owned.kernel(),
        "space": space,
        "pid": os.getpid() if pid == "self" else pid,
        "began": fields[19],
    }


def _is_dead(owner: Mapping[str, Any], age: float) -> bool:
    mine = _owner()
    if any(owner[key] != mine[key] for key in ("kernel", "space")):
        return age > owned.DAY
    try:
        return bool(_owner(int(owner["pid"])) != owner)
    except FileNotFoundError:
        return True
    except OSError:
        return False


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
        tarfile.open(fileobj=cast(IO[bytes], ChunkStream(iter(chunks))), mode="r|") as tar,
    ):
        member = tar.next()
        content = tar.extractfile(member) if member and member.isreg() else None
        if member is None or content is None:
            return False
        if most is not None and member.size > most:
            raise ValueError(f"it has more than {most} bytes")
        to.writelines(blocks_of(content))
    return True
