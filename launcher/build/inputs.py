"""What a row reads from outside, by the lock: found in the cache, or fetched ahead of a build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.build import fetch, source
from launcher.build.image import Request
from launcher.build.pins import Images
from launcher.errors import BuildError, EngineError, LauncherError, UsageError
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
    images: tuple[tuple[str, str | None], ...]


@dataclass(frozen=True)
class Commit:
    """A locked commit in a repository of the cache; `url` is the publisher's."""

    url: str
    commit: str
    repository: Path


@dataclass(frozen=True)
class Fetched:
    """A row's inputs: files and commits in the cache, and IDs of images by their names."""

    row: Needed
    files: tuple[Path, ...]
    commits: tuple[Commit, ...]
    images: Mapping[str, str]


def needed(matrix: Matrix, lock: Lock, request: Request) -> Needed:
    """What a row needs. Raises UsageError for an unknown one, or one the lock doesn't have."""
    row = find_row(matrix, request.tag)
    version = request.megatron or row.megatron
    named = find_release(matrix, row, version)
    unlocked = [
        what
        for what, there in (
            (f"needs of {row.abi}", row.abi in lock.needs),
            (f"packages of {request.tag}", not row.packages or request.tag in lock.packages),
            (f"releases of {version}", version in lock.releases),
        )
        if not there
    ]
    if unlocked:
        raise UsageError(f"matrix.lock has no {', no '.join(unlocked)}", "Run `make lock`.")
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
        images=((row.base, request.base), (matrix.builders[row.abi], request.builder)),
    )


def fetch_all(
    rows: Sequence[Needed], images: Images | None, site: Settings, progress: Progress
) -> tuple[list[Fetched], list[tuple[Needed, LauncherError]]]:
    """Fetch every row's inputs, images where they are given; a row that fails stops no other."""
    fetched: list[Fetched] = []
    failed: list[tuple[Needed, LauncherError]] = []
    for row in rows:
        try:
            fetched.append(_fetch(row, images, site, progress))
        except (BuildError, EngineError) as error:
            progress.fail()
            failed.append((row, error))
    return fetched, failed


def unmet(row: Needed, files: Iterable[str], commits: Iterable[str]) -> list[str]:
    """What a row needs that is not among files, by their sha256, and commits."""
    have, commits = set(files), set(commits)
    lacks = [pin.partition(" ")[0] for pin in row.pins if fetch.sha256_of_pin(pin) not in have]
    if row.kind == "git":
        here = row.locked.git is not None and row.locked.git.commit in commits
    else:
        here = row.locked.sdist is not None and row.locked.sdist.sha256 in have
    return lacks if here else [*lacks, f"Megatron {row.release}"]


def _fetch(row: Needed, images: Images | None, site: Settings, progress: Progress) -> Fetched:
    """One row's inputs, from the cache or from outside.

    Raises BuildError for what can't be fetched or isn't what is locked, EngineError for an image
    that can't be had.
    """
    progress.step(f"{row.tag}: {len(row.pins)} Python packages")
    files = fetch.wheels(list(row.pins), row.python, site)
    progress.step(f"{row.tag}: Megatron {row.release} from {row.kind}")
    commits = []
    if row.kind == "sdist":
        files.append(source.from_sdist(row.release, row.locked, site).at)
    else:
        found = source.from_git(row.release, row.named, row.locked, site)
        commits.append(Commit(row.named.git.url, found.revision, found.at))
    progress.close()
    ids = {}
    if images is not None:
        ids = {chosen or name: images.find(name, chosen).id for name, chosen in row.images}
    return Fetched(row, tuple(files), tuple(commits), ids)


def locked_hashes(lock: Lock) -> set[str]:
    """The sha256 of every file that the lock names."""
    pins: Iterable[str] = [
        *(pin for needs in lock.needs.values() for pin in [*needs.build, *needs.runtime]),
        *(pin for packages in lock.packages.values() for pin in packages),
    ]
    sdists = {one.sdist.sha256 for one in lock.releases.values() if one.sdist}
    return {fetch.sha256_of_pin(pin) for pin in pins} | sdists
