"""Parses an image name into registry, repository, tag and digest, as engines do."""

from __future__ import annotations

from typing import NamedTuple

HUB = "docker.io"
"""The registry of a name without one."""


class ImageName(NamedTuple):
    """An image's name in its parts.

    name: as it was written, without tag and digest; empty strings where it has none of them
    repository: the path at the registry; of `python`, library/python at docker.io
    """

    text: str
    registry: str
    repository: str
    name: str
    tag: str
    digest: str

    @property
    def target(self) -> str:
        """What the registry is asked for: the digest or the tag."""
        return self.digest or self.tag or "latest"

    @property
    def in_full(self) -> str:
        """Registry and repository."""
        return f"{self.registry}/{self.repository}"


def parse_reference(text: str) -> ImageName:
    """The parts of an image's name, which isn't checked."""
    rest, _, digest = text.partition("@")
    head, slash, last = rest.rpartition("/")
    last, _, tag = last.partition(":")
    name = f"{head}{slash}{last}"
    first, slash, repository = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, repository = HUB, name
    if first == HUB and "/" not in repository:
        repository = f"library/{repository}"
    return ImageName(text, first, repository, name, tag, digest)
