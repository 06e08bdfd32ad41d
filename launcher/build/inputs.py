"""What a row reads from outside, by the lock: found in the cache, or fetched ahead of a build."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launcher.build import extensions, fetch, source
from launcher.build.image import Request, check_needs, check_pins
from launcher.build.pins import Images
from launcher.errors import LauncherError, UsageError
from launcher.matrix.load import find_release, find_row
from launcher.matrix.schema import (
    AMD64,
    Extension,
    Interpreter,
    Lock,
    LockedExtension,
    LockedRelease,
    Matrix,
    MegatronRelease,
)
from launcher.progress import Progress
from launcher.settings import Settings


@dataclass(frozen=True)
class Needed:
    """What one row needs.

    pins: of wheels for Python `python`
    images: the matrix's base and builder, each to the one that is asked for in its place, if any
    platform: what the wheels are for, and the builder; interpreter: of a base that has no Python;
    extensions: each with its lock, by its name
    """

    tag: str
    release: str
    python: str
    pins: tuple[str, ...]
    kind: Literal["git", "sdist"]
    named: MegatronRelease
    locked: LockedRelease
    images: tuple[tuple[str, str | None], ...]
    platform: str = AMD64
    interpreter: Interpreter | None = None
    extensions: tuple[tuple[str, Extension, LockedExtension], ...] = ()

    @property
    def commits(self) -> list[str]:
        """The commits that its extensions are compiled from."""
        locked = [one for _, _, one in self.extensions]
        return [git.commit for one in locked for git in (one.git, *one.submodules.values())]


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


def needed(matrix: Matrix, lock: Lock, request: Request, platform: str | None = None) -> Needed:
    """What a row needs on a platform, the first of its own where none is named.

    Raises UsageError for an unknown row, or one the lock doesn't have or has older packages of.
    """
    row = find_row(matrix, request.tag)
    platform = platform or row.platforms[0]
    if platform not in row.platforms:
        own = ", ".join(row.platforms)
        raise UsageError(f"{request.tag}: is not for {platform}", f"The row is for {own}.")
    key = row.compiled_by(platform)
    version = request.megatron or row.megatron
    named = find_release(matrix, row, version)
    unlocked = [
        what
        for what, there in (
            (f"needs of {key}", key in lock.needs),
            (f"packages of {request.tag}", not row.packages or request.tag in lock.packages),
            (f"releases of {version}", version in lock.releases),
            *((f"extensions of {name}", name in lock.extensions) for name in row.extensions),
        )
        if not there
    ]
    if unlocked:
        raise UsageError(f"matrix.lock has no {', no '.join(unlocked)}", "Run `make lock`.")
    needs = lock.needs[key]
    check_needs(matrix.needs, needs)
    packages = lock.packages[request.tag] if row.packages else []
    check_pins(request.tag, row, packages)
    compilers = needs.extensions if row.extensions else []
    return Needed(
        tag=request.tag,
        release=version,
        python=row.python,
        pins=tuple(dict.fromkeys([*needs.build, *needs.runtime, *packages, *compilers])),
        kind="sdist" if row.source == "sdist" and named.sdist else "git",
        named=named,
        locked=lock.releases[version],
        images=((row.base, request.base), (matrix.builders[key], request.builder)),
        platform=platform,
        interpreter=matrix.interpreters[row.interpreter] if row.interpreter else None,
        extensions=tuple(
            (name, matrix.extensions[name], lock.extensions[name]) for name in row.extensions
        ),
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
        except LauncherError as error:
            progress.fail()
            failed.append((row, error))
    return fetched, failed


def unmet(row: Needed, files: Iterable[str], commits: Iterable[str]) -> list[str]:
    """What a row needs that is not among files, by their sha256, and commits."""
    have, commits = set(files), set(commits)
    lacks = [pin.partition(" ")[0] for pin in row.pins if fetch.sha256_of_pin(pin) not in have]
    if row.interpreter and row.interpreter.sha256 not in have:
        lacks.append(f"Python {row.python}")
    lacks += [f"commit {commit}" for commit in row.commits if commit not in commits]
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
    files = fetch.wheels(list(row.pins), row.python, site, row.platform)
    progress.step(f"{row.tag}: Megatron {row.release} from {row.kind}")
    commits = []
    if row.kind == "sdist":
        files.append(source.from_sdist(row.release, row.locked, site).at)
    else:
        found = source.from_git(row.release, row.named, row.locked, site)
        commits.append(Commit(row.named.git.url, found.revision, found.at))
    progress.close()
    if row.interpreter:
        progress.step(f"{row.tag}: Python {row.python}")
        files.append(fetch.archive(row.interpreter, site))
        progress.close()
    for name, wanted, locked in row.extensions:
        progress.step(f"{row.tag}: {name} from git")
        one = extensions.from_git(name, wanted, locked, site)
        urls = {"": wanted.git.url, **wanted.submodules}
        commits += [
            Commit(urls[path], git.commit, one.repositories[path])
            for path, git in one.commits.items()
        ]
        progress.close()
    ids = {}
    if images is not None:
        ids = {chosen or name: images.find(name, chosen).id for name, chosen in row.images}
    return Fetched(row, tuple(files), tuple(commits), ids)


def locked_hashes(lock: Lock) -> set[str]:
    """The sha256 of every file that the lock names."""
    pins: Iterable[str] = [
        *(
            pin
            for needs in lock.needs.values()
            for pin in [*needs.build, *needs.runtime, *needs.extensions]
        ),
        *(pin for packages in lock.packages.values() for pin in packages),
    ]
    sdists = {one.sdist.sha256 for one in lock.releases.values() if one.sdist}
    return {fetch.sha256_of_pin(pin) for pin in pins} | sdists
