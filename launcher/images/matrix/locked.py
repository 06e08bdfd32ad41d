"""The models of matrix.lock and of the locks of extras: what the matrix names, exactly."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from launcher.images.matrix.schema import (
    Abi,
    Commit,
    Digest,
    Extension,
    Folder,
    GitRef,
    GitSource,
    Name,
    Package,
    Pin,
    Platform,
    Reference,
    Release,
    Sha256,
    StrictMatrix,
    Tag,
    Text,
)


class LockedGit(StrictMatrix):
    """A commit, the tree it must have, and its time in seconds since 1970.

    `ref` is the tag or branch that named the commit, where the matrix has one.
    """

    commit: Commit
    ref: GitRef | None = None
    tree: Commit
    epoch: int

    def is_of(self, named: GitSource) -> bool:
        """Whether it was locked for what is named."""
        return self.ref == named.ref and named.commit in (None, self.commit)


class LockedSdist(StrictMatrix):
    """A source distribution and the newest time in it, in seconds since 1970."""

    sha256: Sha256
    epoch: int


class LockedRelease(StrictMatrix):
    """What a release's sources are, exactly; None where there is no such source."""

    git: LockedGit | None = None
    sdist: LockedSdist | None = None


class LockedExtension(StrictMatrix):
    """What an extension is compiled from, exactly.

    links: the commit at each of the tree's submodules, which the tree's own hash is made with;
    submodules: those of them that are used
    """

    git: LockedGit
    links: dict[Folder, Commit] = Field(default_factory=dict)
    submodules: dict[Folder, LockedGit] = Field(default_factory=dict)

    def is_of(self, wanted: Extension) -> bool:
        """Whether it was locked for what is wanted."""
        return self.git.is_of(wanted.git) and {*self.submodules} == {*wanted.submodules}


class LockedNeeds(StrictMatrix):
    """Pinned requirements of one ABI, in pip's own form."""

    build: list[Pin]
    runtime: list[Pin]
    extensions: list[Pin] = Field(default_factory=list)


class LockedPlatform(StrictMatrix):
    """An image for one platform: the digests of its manifest and of its configuration."""

    manifest: Digest
    config: Digest


class LockedImage(StrictMatrix):
    """What a tag named when it was locked: an index of platforms, or one platform's manifest."""

    digest: Digest
    platforms: dict[Platform, LockedPlatform]

    @property
    def digests(self) -> set[str]:
        """Every name that an engine may have for it, by how it came there and how it is kept."""
        parts = self.platforms.values()
        return {self.digest, *(p.manifest for p in parts), *(p.config for p in parts)}


class Lock(StrictMatrix):
    """matrix.lock as a whole. An image that no registry answered for has no entry in `images`."""

    images: dict[Reference, LockedImage] = Field(default_factory=dict)
    needs: dict[Abi, LockedNeeds]
    packages: dict[Tag, list[Pin]]
    releases: dict[Release, LockedRelease]
    extensions: dict[Name, LockedExtension] = Field(default_factory=dict)


class ExtrasLock(StrictMatrix):
    """What some extras are on one base, exactly.

    base: the digest or the ID of the image that they were resolved for; glibc: the minor version
    of its glibc 2, which the wheels may need; rests_on: what they need of what is there already,
    versions by name
    """

    tag: Tag
    base: Digest
    platform: Text
    glibc: Annotated[int, Field(ge=5, le=99)]
    requirements: list[Package]
    rests_on: dict[Text, Text]
    pins: list[Pin]
