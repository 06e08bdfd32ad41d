"""Writes matrix.lock: the exact versions and hashes of all that the matrix names.

Sorted, without times and without URLs: a site's mirrors don't show in it. A pin that still holds is
kept, so that locking again changes nothing; what is asked and can't be reached keeps its pin too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import yaml

from launcher.base import files, owned
from launcher.base.errors import BuildError, EngineError, UsageError, nearest
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.matrix.locked import (
    Lock,
    LockedExtension,
    LockedGit,
    LockedImage,
    LockedNeeds,
    LockedPlatform,
    LockedRelease,
    LockedSdist,
)
from launcher.images.matrix.requirements import outdated, pinned_versions
from launcher.images.matrix.schema import AMD64, GitSource, Matrix
from launcher.images.oci import registry
from launcher.images.sources import extensions, fetch, index, megatron_source
from launcher.images.sources.uv import RequirementSet, resolve

HEADER = "# Generated from matrix.yaml by `make lock`; do not edit.\n"
AT_A_TIME = 6  # registries asked
NOT_ASKED = "it is not asked for, as --offline says"

Pinned = TypeVar("Pinned")


@dataclass(frozen=True)
class LockRequest:
    """What may be asked: upgrade names pins that are asked for anew, all of them where it is empty.

    Names are a package's, a release's, an extension's or an image's. offline: nothing is asked.
    """

    upgrade: Collection[str] | None = None
    offline: bool = False

    def anew(self, *names: str) -> bool:
        """Whether a pin with one of these names is asked for, though it holds."""
        wanted = self.upgrade
        return wanted is not None and (not wanted or not {*names}.isdisjoint(wanted))

    def packages(self, *sets: Sequence[str]) -> list[str]:
        """uv's options for the packages that are asked for anew, of those in sets of pins."""
        if self.upgrade is not None and not self.upgrade:
            return ["--upgrade"]
        names = sorted({name for pins in sets for name in pinned_versions(pins)})
        return [f"--upgrade-package={name}" for name in names if self.anew(name)]


def lock(
    matrix: Matrix,
    old: Lock | None,
    site: Settings,
    progress: Progress,
    asking: LockRequest = LockRequest(),
) -> Lock:
    """Resolve all of the matrix; an entry that keeps its old pin is reported.

    Raises BuildError for what can't be resolved and has no old pin; an image needn't have one.
    Raises UsageError for a name in `asking` that nothing has.
    """
    old = old or Lock(needs={}, packages={}, releases={})
    sets = [part for needs in old.needs.values() for _, part in needs]
    pinned = {name for pins in [*sets, *old.packages.values()] for name in pinned_versions(pins)}
    known = sorted({*pinned, *matrix.releases, *matrix.extensions, *matrix.images})
    for name in asking.upgrade or ():
        if name not in known:
            raise UsageError(f"--upgrade: nothing that is locked is {name}", nearest(name, known))
    return _LockBuilder(matrix, old, site, progress, asking).all()


@dataclass(frozen=True)
class _LockBuilder:
    """One lock in the making."""

    matrix: Matrix
    old: Lock
    site: Settings
    progress: Progress
    asking: LockRequest

    def all(self) -> Lock:
        rows = self.matrix.rows
        used = {name for row in rows.values() for name in row.extensions}
        used |= {name for one in self.matrix.extras.values() for name in one.extensions}
        return Lock(
            needs={key: self.needs(key) for key in self.matrix.builders},
            packages={tag: self.packages(tag) for tag, row in rows.items() if row.packages},
            releases={version: self.release(version) for version in self.matrix.releases},
            extensions={
                name: self.extension(name) for name in self.matrix.extensions if name in used
            },
            images=self.images(),
        )

    def pin(
        self, what: str, before: Pinned | None, ask: bool, resolve: Callable[[], Pinned]
    ) -> Pinned:
        """`before`, where it holds and isn't to be asked for, or can't be; else what is found."""
        if before is not None and not ask:
            return before
        self.progress.step(f"lock {what}")
        try:
            if self.asking.offline:
                raise BuildError(NOT_ASKED)
            found = resolve()
        except BuildError as error:
            self.progress.fail()
            if before is None:
                raise BuildError(f"{what}: {error.problem}", error.remedy) from error
            self.progress.note(f"{what} keeps its old pin: {error.problem}")
            return before
        self.progress.close()
        return found

    def needs(self, key: str) -> LockedNeeds:
        """The needs of an ABI, by the key of its builder: cp312, or cp312-arm64."""
        abi, _, other = key.partition("-")
        python, platform = f"3.{abi.removeprefix('cp3')}", f"linux/{other}" if other else AMD64
        before = self.old.needs.get(key, LockedNeeds(build=[], runtime=[]))
        parts = {part: (some, getattr(before, part)) for part, some in self.matrix.needs}
        holds = all(
            len(pins) == len(some) and not outdated(some, pins) for some, pins in parts.values()
        )
        upgrades = self.asking.packages(*(pins for _, pins in parts.values()))

        def found() -> LockedNeeds:
            options = ["--no-deps", *upgrades]
            wanted = {
                part: RequirementSet(some, python, pins, options, platform)
                for part, (some, pins) in parts.items()
            }
            return LockedNeeds(
                **{part: resolve(one, self.site).pins for part, one in wanted.items()}
            )

        return self.pin(f"needs of {key}", before if holds else None, bool(upgrades), found)

    def packages(self, tag: str) -> list[str]:
        """The packages of a row; what they need, in turn, nobody but an index knows."""
        row, before = self.matrix.rows[tag], self.old.packages.get(tag, [])
        wanted = RequirementSet(row.packages, row.python, before, self.asking.packages(before))
        held = None if outdated(row.packages, before) else before
        return self.pin(f"packages of {tag}", held, True, lambda: resolve(wanted, self.site).pins)

    def release(self, version: str) -> LockedRelease:
        """A release's commit, and its sdist where it has one."""
        named, before = self.matrix.releases[version], self.old.releases.get(version)
        anew, git, sdist = self.asking.anew(version), None, None
        if before and before.git and before.git.is_of(named.git):
            git = before.git
        if named.git.is_named:
            found_git = partial(_lock_git, named.git, self.site)
            git = self.pin(f"{version} from git", git, anew, found_git)
        if named.sdist:
            sdist = before.sdist if before else None
            found = partial(_lock_sdist, version, self.site)
            sdist = self.pin(f"{version} as sdist", sdist, anew, found)
        return LockedRelease(git=git, sdist=sdist)

    def extension(self, name: str) -> LockedExtension:
        """An extension's commit, and those of the submodules that it is compiled with."""
        wanted, before = self.matrix.extensions[name], self.old.extensions.get(name)
        if before and not before.is_of(wanted):
            before = None

        def found() -> LockedExtension:
            return extensions.lock(name, wanted, _lock_git(wanted.git, self.site), self.site)

        return self.pin(f"extension {name}", before, self.asking.anew(name), found)

    def images(self) -> dict[str, LockedImage]:
        """What each base and builder is at its registry; all that are asked are asked at a time.

        One that can't be had keeps its old pin, or has none; either is reported.
        """
        matrix, before = self.matrix, self.old.images
        images = {name: before[name] for name in matrix.images if name in before}
        asked = [
            name
            for name in matrix.images
            if name not in before
            or {*before[name].platforms} != {*matrix.platforms(name)}
            or self.asking.anew(name)
        ]
        if not asked:
            return images
        self.progress.step("lock bases and builders")
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            for reference, answer in zip(asked, pool.map(self._image, asked), strict=True):
                if isinstance(answer, EngineError):
                    kept = reference in images
                    state = "keeps its old pin" if kept else "has no pin, so builds go by its tag"
                    self.progress.note(f"{matrix.images[reference]} {state}: {answer.problem}")
                else:
                    images[reference] = answer
        self.progress.close()
        return images

    def _image(self, reference: str) -> LockedImage | EngineError:
        """What a name is at its registry on each platform that it is used on."""
        if self.asking.offline:
            return EngineError(NOT_ASKED)
        try:
            found = {
                platform: registry.resolve(self.site.mirrored(reference), platform, layers=True)
                for platform in self.matrix.platforms(reference)
            }
        except EngineError as error:
            return error
        if len(names := {one.digest for one in found.values()}) > 1:
            return EngineError(f"{reference}: was moved while it was asked: {', '.join(names)}")
        platforms = {
            platform: LockedPlatform(manifest=one.manifest, config=one.config)
            for platform, one in found.items()
        }
        return LockedImage(digest=names.pop(), platforms=platforms)


def dump(locked: Lock) -> str:
    """The text of matrix.lock."""
    data = locked.model_dump(exclude_none=True)
    return HEADER + yaml.safe_dump(data, sort_keys=True, width=200, default_flow_style=False)


def write(locked: Lock, path: Path) -> None:
    """Write matrix.lock; whoever reads it meanwhile, or after a kill, finds all of one lock.

    So it is where two write at once: the last one's lock stays.
    """
    files.write(path, dump(locked))


def _lock_git(named: GitSource, site: Settings) -> LockedGit:
    """The commit that is named, or that the named tag or branch is at just now."""
    commit = named.commit
    if commit is None:
        assert named.ref is not None
        commit = megatron_source.commit_of(named.url, named.ref, site)
    return extensions.locked_git(named.url, commit, named.ref, site)


def _lock_sdist(version: str, site: Settings) -> LockedSdist:
    """Fetch the sdist once, for its hash and for the newest time in it; none of it is run."""
    with owned.scratch(site.cache) as folder:
        archive = index.download("megatron-core", version, site, folder)
        epoch = index.epoch_of(archive, "megatron-core", version)
        sha256 = fetch.sha256(archive)
        fetch.store(archive, site)
    return LockedSdist(sha256=sha256, epoch=epoch)
