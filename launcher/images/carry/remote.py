"""Pushes and pulls an image through a registry, and compares its digest at both ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.base.errors import LauncherError, UsageError
from launcher.base.reference import parse_reference
from launcher.base.screen import Progress
from launcher.images.oci import registry
from launcher.images.oci.inspection import name_image
from launcher.images.oci.pull import follow, registry_errors
from launcher.images.sources.pins import digest_at

if TYPE_CHECKING:
    from docker import DockerClient


class OtherImageError(LauncherError):
    """A registry's name stands for another image than the expected one."""

    exit_code = 1


@dataclass(frozen=True)
class RemoteCopy:
    """An image on both sides: its name at the registry, its digest there, its ID here."""

    name: str
    digest: str
    id: str


def remote_name(name: str, prefix: str | None) -> str:
    """The name at a registry: `PREFIX/name`, or the name itself where it names a registry.

    Raises UsageError for a name that would mean Docker Hub by default.
    """
    if prefix:
        return f"{prefix.rstrip('/')}/{name}"
    if not name.startswith(f"{parse_reference(name).registry}/"):
        raise UsageError(
            f"{name} names no registry",
            f"Say where it is: --registry registry.example/team, or registry.example/team/{name}",
        )
    return name


def push(client: DockerClient, image: str, remote: str, progress: Progress) -> RemoteCopy:
    """Push the image `image` as `remote`, and ask the registry for what it has under that name.

    Raises EngineError where it can't be pushed, OtherImageError where the registry then has
    another image there.
    """
    named = parse_reference(remote)
    repository, tag = named.name, named.target
    name_image(client, image, remote)
    here = client.api.inspect_image(image)
    with registry_errors(remote):
        events = client.api.push(repository, tag, stream=True, decode=True)
        digest = follow(events, f"push {remote}", progress)
    found = digest_at(client, remote, f"{here['Os']}/{here['Architecture']}")
    if digest not in ("", found):
        raise OtherImageError(
            f"{remote}: the registry has another image than was pushed\n"
            f"  pushed:   {digest}\n  registry: {found}",
            "Somebody may push to the same name: push again, or use another name.",
        )
    return RemoteCopy(remote, found, here["Id"])


def pull(
    client: DockerClient,
    remote: str,
    progress: Progress,
    expected: Sequence[str] = (),
    name: str | None = None,
) -> RemoteCopy:
    """Pull `remote` by the digest that the registry has for it; give it its names at the end.

    expected: digests that it may have: the manifest's, the index's, or the image's ID; first the
    one to pull it by; none to take what there is. name: another name that it gets here. Raises
    OtherImageError where the registry has something else, before any layer comes; EngineError
    where it can't be pulled.
    """
    repository = parse_reference(remote).name
    with registry_errors(remote):
        engine = client.version()
    platform = f"{engine['Os']}/{engine['Arch']}"
    digest = digest_at(client, remote, platform)
    if expected and digest not in expected:
        there = registry.resolve(f"{repository}@{digest}", platform)
        if not {there.manifest, there.config} & {*expected}:
            raise OtherImageError(
                f"{remote}: isn't the expected image; nothing was pulled\n"
                f"  expected: {' or '.join(expected)}\n  registry: {digest}",
                "The name was given to another image since. The expected one may still be there "
                f"as {repository}@{expected[0]}, unless that is an image's ID.",
            )
    with registry_errors(remote):
        by_digest = f"{repository}@{digest}"
        events = client.api.pull(repository, digest, stream=True, decode=True)
        follow(events, f"pull {remote}", progress)
        found = client.api.inspect_image(by_digest)["Id"]
    name_image(client, found, *(one for one in (remote, name) if one and "@" not in one))
    return RemoteCopy(remote, digest, found)
