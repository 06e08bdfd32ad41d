"""Writes matrix.lock: what the matrix's requirements and releases are, exactly.

Sorted, without times and without URLs: locking again with nothing changed outside gives the same
bytes, and a site's mirrors don't show in it. What can't be reached keeps its old pin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from packaging.utils import canonicalize_name

from launcher import files
from launcher.build import extensions, fetch, index, source
from launcher.errors import BuildError, EngineError
from launcher.matrix.schema import (
    AMD64,
    Extension,
    GitSource,
    Lock,
    LockedExtension,
    LockedGit,
    LockedImage,
    LockedNeeds,
    LockedPlatform,
    LockedRelease,
    LockedSdist,
    Matrix,
    Needs,
    Row,
    outdated,
)
from launcher.oci import registry
from launcher.progress import Progress
from launcher.settings import Settings

HEADER = "# Generated from matrix.yaml by `make lock`; do not edit.\n"
AT_A_TIME = 6  # registries asked

# pip evaluates markers by the Python that runs it, whatever --python-version and --platform say.
# What a dependency names by address it builds, whatever --only-binary says. keyring has logins.
PIP = """
import json, os, runpy, sys
from pip._vendor.packaging import markers
def refuse(event, about):
    if event == "subprocess.Popen" and os.path.basename(about[0]) != "keyring":
        raise PermissionError("a dependency without a wheel is not built to learn what it needs")
sys.addaudithook(refuse)
environment = json.loads(sys.argv.pop(1))
markers.default_environment = lambda: dict(environment)
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""

Pinned = TypeVar("Pinned")


def lock(matrix: Matrix, old: Lock | None, site: Settings, progress: Progress) -> Lock:
    """Resolve all of the matrix; each thing that keeps its old pin is told.

    Raises BuildError for what can't be resolved and has no old pin; an image needn't have one.
    """

    def keep(what: str, resolve: Callable[[], Pinned], before: Pinned | None) -> Pinned:
        progress.step(f"lock {what}")
        try:
            found = resolve()
        except BuildError as error:
            progress.fail()
            if before is None:
                raise
            progress.note(f"{what} keeps its old pin: {error.problem}")
            return before
        progress.close()
        return found

    needs = {
        abi: keep(
            f"needs of {abi}",
            partial(_needs, matrix, abi, site),
            _old_needs(old, abi, matrix.needs),
        )
        for abi in matrix.builders
    }
    packages = {
        tag: keep(
            f"packages of {tag}",
            partial(_resolve, row.packages, row.python, site),
            _old_packages(old, tag, row),
        )
        for tag, row in matrix.rows.items()
        if row.packages
    }
    releases = {
        version: LockedRelease(
            git=keep(
                f"{version} from git",
                partial(_lock_git, release.git, site),
                _old_git(old, version, release.git),
            ),
            sdist=keep(
                f"{version} as sdist",
                partial(_lock_sdist, version, site),
                old.releases[version].sdist if old and version in old.releases else None,
            )
            if release.sdist
            else None,
        )
        for version, release in matrix.releases.items()
    }
    compiled = {
        name: keep(
            f"extension {name}",
            partial(_lock_extension, name, extension, site),
            _old_extension(old, name, extension),
        )
        for name, extension in matrix.extensions.items()
        if any(name in row.extensions for row in matrix.rows.values())
    }
    images = _lock_images(matrix, old, site, progress)
    return Lock(
        images=images, needs=needs, packages=packages, releases=releases, extensions=compiled
    )


def dump(locked: Lock) -> str:
    """The text of matrix.lock."""
    data = locked.model_dump(exclude_none=True)
    return HEADER + yaml.safe_dump(data, sort_keys=True, width=200, default_flow_style=False)


def write(locked: Lock, path: Path) -> None:
    """Write matrix.lock; whoever reads it meanwhile, or after a kill, finds all of one lock.

    So it is where two write at once: the last one's lock stays.
    """
    files.write(path, dump(locked))


def _old_needs(old: Lock | None, abi: str, needs: Needs) -> LockedNeeds | None:
    """The old pins of an ABI, unless the matrix needs other packages by now."""
    before = old.needs.get(abi) if old else None
    same = before and all(
        len(pins) == len(wanted) and not outdated(wanted, pins)
        for wanted, pins in (
            (getattr(needs, part), getattr(before, part)) for part in Needs.model_fields
        )
    )
    return before if same else None


def _old_packages(old: Lock | None, tag: str, row: Row) -> list[str] | None:
    """The old pins of a row's packages, unless it asks for others by now."""
    before = old.packages.get(tag) if old else None
    return None if before and outdated(row.packages, before) else before


def _old_git(old: Lock | None, version: str, named: GitSource) -> LockedGit | None:
    """The old pin of a release, unless the matrix names another commit, tag or branch by now."""
    before = old.releases[version].git if old and version in old.releases else None
    return before if before and _is_named(before, named) else None


def _old_extension(old: Lock | None, name: str, wanted: Extension) -> LockedExtension | None:
    """The old pin of an extension, unless the matrix names another commit or submodule by now."""
    before = old.extensions.get(name) if old else None
    if before is None or set(before.submodules) != set(wanted.submodules):
        return None
    return before if _is_named(before.git, wanted.git) else None


def _is_named(locked: LockedGit, named: GitSource) -> bool:
    return locked.ref == named.ref and named.commit in (None, locked.commit)


def _needs(matrix: Matrix, key: str, site: Settings) -> LockedNeeds:
    """The needs of an ABI, by the key of its builder: cp312, or cp312-arm64."""
    abi, _, other = key.partition("-")
    python = f"3.{abi.removeprefix('cp3')}"
    platform = f"linux/{other}" if other else AMD64
    return LockedNeeds(
        build=_resolve(matrix.needs.build, python, site, "--no-deps", platform=platform),
        runtime=_resolve(matrix.needs.runtime, python, site, "--no-deps", platform=platform),
        extensions=_resolve(matrix.needs.extensions, python, site, "--no-deps", platform=platform),
    )


def _resolve(
    requirements: list[str], python: str, site: Settings, *options: str, platform: str = AMD64
) -> list[str]:
    """Let pip choose the newest wheels that fit, with their dependencies unless told otherwise."""
    if not requirements:
        return []
    target = [*fetch.target_options(python, platform), "--only-binary=:all:", "--target=unused"]
    report = _pip_report(requirements, [*target, *options], _markers(python, platform), site)
    return sorted(_pin(item) for item in report["install"])


def _markers(python: str, platform: str) -> dict[str, str]:
    """What conditions of requirements see of a row: the names of PEP 508.

    The row says no more of its Python than 3.10, which is taken for 3.10.0, as pip does.
    """
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": fetch.MACHINES[platform],
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def _pin(item: dict[str, Any]) -> str:
    meta = item["metadata"]
    sha256 = item["download_info"]["archive_info"]["hashes"].get("sha256")
    if sha256 is None:
        raise BuildError(
            f"the index has no sha256 of {meta['name']} {meta['version']}",
            "Name another in PIP_INDEX_URL: files of this one can't be pinned.",
        )
    return f"{meta['name'].lower()}=={meta['version']} --hash=sha256:{sha256}"


def _pip_report(
    requirements: list[str], args: list[str], markers: dict[str, str], site: Settings
) -> dict[str, Any]:
    """What pip would install, by its own report, which says by which markers as well."""
    command = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", *args]
    done = fetch.pip_for(requirements, command, site, ["-c", PIP, json.dumps(markers)])
    if done.returncode:
        raise BuildError(f"pip can't resolve it:\n{fetch.last_errors(done.stderr)}")
    report: dict[str, Any] = json.loads(done.stdout)
    if report["environment"] != markers:
        version = report["pip_version"]
        raise BuildError(f"pip {version} resolves for this Python alone", "Install an older pip.")
    return report


def _lock_git(named: GitSource, site: Settings) -> LockedGit:
    """The commit that is named, or that the named tag or branch is at just now."""
    commit = named.commit
    if commit is None:
        assert named.ref is not None
        commit = source.commit_of(named.url, named.ref, site)
    return extensions.locked_git(named.url, commit, named.ref, site)


def _lock_extension(name: str, wanted: Extension, site: Settings) -> LockedExtension:
    """An extension's commit, and those of the submodules that it is compiled with."""
    return extensions.lock(name, wanted, _lock_git(wanted.git, site), site)


def _lock_images(
    matrix: Matrix, old: Lock | None, site: Settings, progress: Progress
) -> dict[str, LockedImage]:
    """What each base and builder is at its registry; all are asked at a time.

    One that can't be had keeps its old pin, or has none; either is told.
    """

    def ask(reference: str) -> LockedImage | EngineError:
        try:
            found = {
                platform: registry.resolve(site.mirrored(reference), platform)
                for platform in matrix.platforms(reference)
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

    images = {}
    progress.step("lock bases and builders")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        answers = pool.map(ask, matrix.images)
        for (reference, roles), answer in zip(matrix.images.items(), answers, strict=True):
            before = old.images.get(reference) if old else None
            if isinstance(answer, EngineError):
                state = "keeps its old pin" if before else "has no pin, so builds go by its tag"
                progress.note(f"{roles} {state}: {answer.problem}")
            if found := before if isinstance(answer, EngineError) else answer:
                images[reference] = found
    progress.close()
    return images


def _lock_sdist(version: str, site: Settings) -> LockedSdist:
    """Fetch the sdist once, for its hash and for the newest time in it; none of it is run."""
    with files.scratch(site.cache) as folder:
        archive = index.download("megatron-core", version, site, folder)
        found = index.described(archive)
        if (canonicalize_name(found.name), found.version) != ("megatron-core", version):
            raise BuildError(
                f"{archive.name}: its PKG-INFO says that it is {found.name} {found.version}",
                "The index serves another file under this name: don't build with it.",
            )
        sha256 = fetch.sha256(archive)
        fetch.store(archive, site)
    return LockedSdist(sha256=sha256, epoch=found.newest)
