"""The base and builder of a build: those of the lock, else what a tag names, with a warning."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from launcher.base.errors import BuildError, EngineError
from launcher.base.names import LABEL
from launcher.base.reference import parse_reference
from launcher.base.screen import Progress
from launcher.base.settings import Settings, settings
from launcher.images.matrix.locked import LockedImage
from launcher.images.matrix.schema import AMD64
from launcher.images.oci import registry
from launcher.images.oci.inspection import (
    answer_within,
    engine_errors,
    find_image,
    name_image,
    tags_of,
)
from launcher.images.oci.pull import describe_pull_failure, follow, registry_errors

if TYPE_CHECKING:
    from docker import DockerClient

ASK_WITHIN = 30  # seconds at least, for an engine that asks a registry


@dataclass(frozen=True)
class StartImage:
    """An image that the engine has.

    name: for FROM, by digest where the engine knows it so; id: the engine's, which each numbers in
    its way; reference: the matrix's for the locked image, wherever it was pulled from, else the one
    that was asked for; digest: sha256:…, of the lock where `pinned`, else the ID; standin: whether
    it stands in where no registry is in reach
    """

    name: str
    id: str
    reference: str
    digest: str
    pinned: bool
    platform: str = AMD64
    standin: bool = False


@dataclass
class StartImages:
    """Finds the base and the builder of each row in one engine, pulls what it lacks."""

    client: DockerClient
    site: Settings
    progress: Progress
    locked: dict[str, LockedImage]
    moving: list[str]
    _found: dict[tuple[str, str, str], StartImage] = field(default_factory=dict)

    def find(self, reference: str, chosen: str | None, platform: str) -> StartImage:
        """The image for the matrix's `reference`, or the one that a user chose in its place.

        Raises BuildError for a tag that isn't where it was locked, EngineError for an image that
        can't be had, UsageError for what is no image's name.
        """
        wanted = chosen or reference
        key = reference, wanted, platform
        if key not in self._found:
            self.progress.show(f"look for {wanted}")
            locked = self.locked.get(reference) if wanted == reference else None
            try:
                found = locked and self._locked(reference, locked, platform)
                self._found[key] = found or self._named(*key)
            finally:
                self.progress.show("")
        return self._found[key]

    @cached_property
    def own_platform(self) -> str:
        """The platform that the engine pulls images for by default: linux/amd64."""
        version = self.client.version()
        return f"{version['Os']}/{version['Arch']}"

    def platform(self, wanted: str) -> str:
        """What the engine's image of a name is for; where it has none, what it would pull for."""
        found = find_image(self.client, wanted)
        return platform_of(found) if found else self.own_platform

    def _named(self, reference: str, wanted: str, platform: str) -> StartImage:
        """The image that a name stands for just now; a warning where that isn't the locked one.

        A user's own choice is pulled under its own name, the matrix's from a mirror of it.
        """
        found = self._here(wanted, platform)
        if found is None:
            at = wanted if wanted != reference else self.site.mirrored(wanted)
            found = self._pull(at, wanted, platform)
        locked = self.locked.get(reference)
        start = _image(found, self._name_of(found, wanted, locked), wanted, reference, locked)
        if start.pinned or "@sha256:" in wanted:
            return start
        if not any(wanted == other for _, other, _ in self._found):
            why = "not the locked image" if locked else "matrix.lock has no digest of it"
            mend = ""
            if wanted == reference:
                mend = ". `make lock`, where its registry answers, holds it to a digest"
            elif found.get("RepoDigests"):
                name = parse_reference(wanted).name
                mend = f". To hold it, name it by its digest: {name}@{_digest(found)}"
            self.progress.note(f"UNPINNED {wanted}: {why}, so it is {_digest(found)} today{mend}")
        return start

    def _locked(self, reference: str, locked: LockedImage, platform: str) -> StartImage:
        """The locked image, under whatever name the engine has it, else pulled by its digest."""
        found = self._here(reference, platform)
        moves = reference in self.moving
        if found is not None and not is_locked(found, locked) and not moves:
            raise moved(reference, locked.digest, "engine", _digest(found))
        mirrored = self.site.mirrored(reference)
        if not is_locked(found, locked):  # under no name, perhaps, or under one of these
            names = [
                f"{parse_reference(one).name}@{locked.digest}" for one in (reference, mirrored)
            ]
            known_by = [*names, *sorted(locked.digests)]
            there = (self._here(one, platform) for one in known_by)
            found = next((one for one in there if is_locked(one, locked)), None)
        if found is None:
            now = locked.digest if moves else digest_at(self.client, mirrored, platform)
            if now != locked.digest:
                raise moved(reference, locked.digest, "registry", now)
            at = f"{parse_reference(mirrored).name}@{locked.digest}"
            found = self._pull(at, reference, platform)
        name = self._name_of(found, reference, locked)
        return _image(found, name, reference, reference, locked)

    def _here(self, wanted: str, platform: str) -> dict[str, Any] | None:
        """The engine's image of a name for the platform; None where it has none."""
        names = (wanted, _beside(wanted, platform))
        there = (find_image(self.client, name) for name in names)
        return next((one for one in there if one and platform_of(one) == platform), None)

    def _pull(self, at: str, wanted: str, platform: str) -> dict[str, Any]:
        """Pull what `at` names, and give it the name `wanted` where that is free.

        An image for another platform than the engine's is pulled by its own digest and named
        beside `wanted`: that name stays the engine's platform's.
        """
        if platform != self.own_platform:
            digest = registry.resolve(at, platform).manifest
            at, wanted = f"{parse_reference(at).name}@{digest}", _beside(wanted, platform)
        with registry_errors(at):
            events = self.client.api.pull(at, stream=True, decode=True)
            follow(events, f"pull {at}", self.progress)
            found: dict[str, Any] = self.client.api.inspect_image(at)
        if "@" not in wanted and find_image(self.client, wanted) is None:
            name_image(self.client, found["Id"], wanted)
        return found

    def _name_of(self, found: dict[str, Any], wanted: str, locked: LockedImage | None) -> str:
        """A name for FROM, which takes no bare ID: by digest where the engine knows it so.

        What was loaded from a file is known by its tags alone, or by nothing: then it gets one.
        """
        for one in sorted(found.get("RepoDigests") or []):
            if locked and one.partition("@")[2] in locked.digests:
                return str(one)
        for name in (wanted, *tags_of(found)):
            if (find_image(self.client, name) or {}).get("Id") == found["Id"]:
                return str(name)
        repository = parse_reference(wanted).name
        tag = f"locked-{found['Id'].removeprefix('sha256:')[:12]}"
        self.client.api.tag(found["Id"], repository, tag)
        return f"{repository}:{tag}"


def _image(
    found: dict[str, Any], name: str, asked: str, reference: str, locked: LockedImage | None
) -> StartImage:
    """What an engine reports of an image that was asked for in place of the matrix's."""
    pinned = is_locked(found, locked)
    return StartImage(
        name,
        found["Id"],
        reference if pinned else asked,
        locked.digest if locked and pinned else found["Id"],
        pinned,
        platform_of(found),
        is_standin(found),
    )


def platform_of(image: dict[str, Any]) -> str:
    """What an inspected image is for: linux/amd64."""
    return f"{image.get('Os', 'linux')}/{image.get('Architecture', 'amd64')}"


def _beside(wanted: str, platform: str) -> str:
    """The name of an image for another platform than that of the image called `wanted`."""
    name = parse_reference(wanted)
    architecture = platform.partition("/")[2]
    return wanted if name.digest else f"{name.name}:{name.target}-{architecture}"


def digest_at(client: DockerClient, reference: str, platform: str) -> str:
    """The digest that the registry has for a tag, asked by the engine. Raises EngineError."""
    try:
        with answer_within(client, max(ASK_WITHIN, settings().answer_within)):
            return str(client.api.inspect_distribution(reference)["Descriptor"]["digest"])
    except engine_errors() as error:
        try:
            return registry.resolve(reference, platform).digest  # an engine needn't be able to ask
        except EngineError:
            raise describe_pull_failure(reference, error) from error


def is_standin(image: dict[str, Any]) -> bool:
    """Whether an inspected image is one that stands in where no registry is in reach."""
    return f"{LABEL}standin" in ((image.get("Config") or {}).get("Labels") or {})


def is_locked(found: dict[str, Any] | None, locked: LockedImage | None) -> bool:
    """Whether an inspected image is the locked one, by its ID or a digest it was pulled by.

    An ID is the configuration's digest or, in containerd's store, the manifest's or the index's.
    """
    if found is None or locked is None:
        return False
    pulled_by = {one.partition("@")[2] for one in found.get("RepoDigests") or []}
    return bool({found["Id"], *pulled_by} & locked.digests)


def moved(reference: str, locked: str, where: str, now: str) -> BuildError:
    """The error for a tag that names another image than the locked one."""
    mend = (
        f"`docker rmi {reference}` has the locked one pulled by its digest"
        if where == "engine"
        else f"the locked one may still be had as {parse_reference(reference).name}@{locked}"
    )
    return BuildError(
        f"{reference}: isn't the locked image\n  locked:    {locked}\n  {where + ':':<10} {now}",
        f"Where its publisher has moved the tag, `make lock UPGRADE={reference}` takes the new "
        f"one; {mend}.",
    )


def _digest(found: dict[str, Any]) -> str:
    """What an image is known by: the digest that it was pulled by, else its ID."""
    pulled_by = [one.partition("@")[2] for one in found.get("RepoDigests") or []]
    return str(pulled_by[0] if pulled_by else found["Id"])
