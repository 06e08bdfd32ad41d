"""What a row reads from outside, by the lock: found in the cache, or fetched ahead of a build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.build import fetch, source
from launcher.build.image import Request
from launcher.errors import UsageError
from launcher.matrix.load import find_release, find_row
from launcher.matrix.schema import Lock, LockedRelease, Matrix, MegatronRelease
from launcher.progress import Progress
from launcher.settings import Settings


@dataclass(frozen=True)
class Needed:
    """What one row needs.

    pins: of wheels for Python `python`
    images: the matrix's base and builder, each to the one that is asked for in its place, if any
    """

    tag: str
    release: str
    python: str
    pins: tuple[str, ...]
    kind: Literal["git", "sdist"]
    named: MegatronRelease
    locked: LockedRelease
    images: Mapping[str, str | None]


@dataclass(frozen=True)
class Commit:
    """A locked commit in a repository of the cache; `url` is the publisher's."""

    url: str
    commit: str
    repository: Path


def needed(matrix: Matrix, lock: Lock, request: Request) -> Needed:
    """What a row needs. Raises UsageError for an unknown one, or one the lock doesn't have."""
    row = find_row(matrix, request.tag)
    version = request.megatron or row.megatron
    named = find_release(matrix, row, version)
    missing = f"matrix.lock has no {{}} of {request.tag}", "Run `make lock`."
    if row.abi not in lock.needs or (row.packages and request.tag not in lock.packages):
        raise UsageError(missing[0].format("packages"), missing[1])
    if version not in lock.releases:
        raise UsageError(missing[0].format(f"release {version}"), missing[1])
    needs = lock.needs[row.abi]
    packages = lock.packages[request.tag] if row.packages else []
    return Needed(
        tag=request.tag,
        release=version,
        python=row.python,
        pins=tuple(dict.fromkeys([*needs.build, *needs.runtime, *packages])),
        kind="sdist" if row.source == "sdist" and named.sdist else "git",
        named=named,
        locked=lock.releases[version],
        images={row.base: request.base, matrix.builders[row.abi]: request.builder},
    )


def fetched(one: Needed, site: Settings, progress: Progress) -> tuple[list[Path], list[Commit]]:
    """The row's files and its source's commit, in the cache, fetched where they weren't there.

    Raises BuildError for what can't be fetched, or isn't what is locked.
    """
    progress.step(f"{one.tag}: {len(one.pins)} Python packages")
    files = fetch.wheels(list(one.pins), one.python, site)
    progress.step(f"{one.tag}: Megatron {one.release} from {one.kind}")
    commits = []
    if one.kind == "sdist":
        files.append(source.from_sdist(one.release, one.locked, site).at)
    else:
        found = source.from_git(one.release, one.named, one.locked, site)
        commits.append(Commit(one.named.git.url, found.revision, found.at))
    progress.close()
    return files, commits


def locked_hashes(lock: Lock) -> set[str]:
    """The sha256 of every file that the lock names."""
    pins: Iterable[str] = [
        *(pin for needs in lock.needs.values() for pin in [*needs.build, *needs.runtime]),
        *(pin for packages in lock.packages.values() for pin in packages),
    ]
    sdists = {one.sdist.sha256 for one in lock.releases.values() if one.sdist}
    return {fetch.sha256_of_pin(pin) for pin in pins} | sdists
