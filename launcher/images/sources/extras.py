"""The extras of an image, resolved against what its base has, and the locks that keep the answer.

A lock is a small file that can be committed: extras/TAG/NAMES.PLATFORM.yaml beside matrix.yaml. One
that isn't there is made at the first build, in the site's own folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from pydantic import Field

from launcher.base import files, yamlfile
from launcher.base.errors import BuildError, nearest
from launcher.base.settings import Settings
from launcher.images.matrix.extras import PROTECTED, suffix
from launcher.images.matrix.recipe import Recipe
from launcher.images.matrix.schema import (
    Digest,
    Matrix,
    Package,
    Pin,
    StrictMatrix,
    Text,
    caps_of,
    outdated,
    pinned_versions,
)
from launcher.images.sources import fetch
from launcher.images.sources.resolve import RequirementSet, resolve

HEADER = "# Written by `launcher image build --extras`. Remove it to have it resolved anew.\n"


class ExtrasLock(StrictMatrix):
    """What some extras are on one base, exactly.

    base: the digest or the ID of the image that they were resolved for; glibc: the minor version
    of its glibc 2, which the wheels may need; rests_on: what they need of what is there already,
    versions by name
    """

    base: Digest
    platform: Text
    glibc: Annotated[int, Field(ge=5, le=99)]
    requirements: list[Package]
    rests_on: dict[Text, Text]
    pins: list[Pin]

    def is_of(self, made: Recipe, limits: Sequence[str]) -> bool:
        """Whether it was made for a recipe's extras, under limits that hold still."""
        pinned = pinned_versions(self.pins)
        still = [one for one in limits if canonicalize_name(Requirement(one).name) in pinned]
        own = (self.platform, *self.requirements) == (made.platform, *made.extras.packages)
        return own and not outdated(still, self.pins)

    def holds_on(self, ground: Ground) -> bool:
        """Whether it can be used on another base than its own, as it would be on that."""
        there = ground.packages
        return (
            self.glibc <= ground.glibc
            and all(there.get(name) == version for name, version in self.rests_on.items())
            and not {*pinned_versions(self.pins)} & {*there}
        )


@dataclass(frozen=True)
class Ground:
    """What extras are put on: an image with what else is added to it.

    base: its digest; packages: versions by normalised name; limits: the lines of its
    /etc/pip/constraint.txt; glibc: minor version of its glibc 2
    """

    base: str
    packages: Mapping[str, str]
    limits: Sequence[str] = ()
    glibc: int = fetch.GLIBC


def ground(
    base: str, packages: Mapping[str, str], limits: Sequence[str], glibc: str, made: Recipe
) -> Ground:
    """What a recipe's extras are put on, by what was seen in its base; glibc: 2.35.

    What Megatron needs is on it where the base has none of its own.
    """
    own = {**packages, **pinned_versions(made.pins.get("packages", ()))}
    need = {n: v for n, v in pinned_versions(made.pins["runtime"]).items() if n not in own}
    minor = glibc.partition(".")[2]
    return Ground(base, {**own, **need}, limits, int(minor) if minor.isdigit() else fetch.GLIBC)


def with_lock(made: Recipe, lock: ExtrasLock) -> Recipe:
    """The recipe with the pins of its extras."""
    pins = {**made.pins, "extras": lock.pins}
    return replace(made, pins=pins, glibc=lock.glibc)


def path_of(made: Recipe) -> Path:
    """Where the lock of a recipe's extras lies, below a folder of such locks."""
    architecture = made.platform.partition("/")[2]
    return Path(made.tag, f"{suffix(made.extras.names)[1:]}.{architecture}.yaml")


def find_lock(made: Recipe, matrix: Matrix, site: Settings) -> ExtrasLock | None:
    """The lock of a recipe's extras: the one beside the matrix, else the site's own; or None.

    Raises UsageError for a file that is no lock.
    """
    limits = limits_of(made, matrix)
    for folder in (site.matrix.parent / "extras", site.extras):
        path = folder / path_of(made)
        if path.is_file() and (lock := yamlfile.load(path, ExtrasLock)).is_of(made, limits):
            return lock
    return None


def locks(site: Settings) -> Iterator[ExtrasLock]:
    """All locks beside the matrix and in the site's own folder. Raises as `find_lock` does."""
    for folder in (site.matrix.parent / "extras", site.extras):
        for path in sorted(folder.glob("*/*.yaml")):
            yield yamlfile.load(path, ExtrasLock)


def keep(lock: ExtrasLock, made: Recipe, site: Settings) -> Path:
    """Write a lock into the site's own folder; where it lies."""
    return keep_text(dump(lock), path_of(made), site)


def keep_text(text: str, at: Path, site: Settings) -> Path:
    """Write the text of a lock into the site's own folder, below which `at` is."""
    path = site.extras / at
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)
    return path


def dump(lock: ExtrasLock) -> str:
    """The text of a lock."""
    data = lock.model_dump(mode="json")
    return HEADER + yaml.dump(data, Dumper=yamlfile.PortableDumper, sort_keys=False, width=200)


def limits_of(made: Recipe, matrix: Matrix) -> list[str]:
    """What is known to limit packages on the row's torch, which their own metadata doesn't say."""
    return [cap.package for cap in caps_of(made.row.torch, matrix.caps)]


def resolve_lock(made: Recipe, matrix: Matrix, on: Ground, site: Settings) -> ExtrasLock:
    """Resolve a recipe's extras on what is there, which stays as it is.

    Raises BuildError that names the two requirements that clash, where they can't be had together.
    """
    wanted = made.extras.packages
    caps = limits_of(made, matrix)
    asked = RequirementSet(
        wanted,
        made.row.python,
        platform=made.platform,
        there=on.packages,
        limits=[*caps, *_usable(on)],
        glibc=on.glibc,
    )
    what = f"the extras of {made.tag} ({' '.join(made.extras.names)})"
    try:
        found = resolve(asked, site)
        _check_protected(found.pins)
    except BuildError as error:
        raise BuildError(f"{what}: {error.problem}", _remedy(error, made, matrix)) from error
    return ExtrasLock(
        base=on.base,
        platform=made.platform,
        glibc=on.glibc,
        requirements=list(wanted),
        rests_on=found.rests_on,
        pins=found.pins,
    )


def _usable(on: Ground) -> Iterator[str]:
    """The limits of a base's constraint file that say something of what it hasn't installed."""
    for line in on.limits:
        try:
            one = Requirement(line.partition(" #")[0].strip())
        except InvalidRequirement:
            continue
        if not one.url and canonicalize_name(one.name) not in on.packages:
            yield str(one)


def _check_protected(pins: Sequence[str]) -> None:
    """Raise BuildError where something would bring what a base alone has, built for its CUDA."""
    if brought := sorted(PROTECTED & {*pinned_versions(pins)}):
        raise BuildError(
            f"they need {', '.join(brought)}, which the base hasn't and an image isn't given",
            "Take a base that has it.",
        )


def _remedy(error: BuildError, made: Recipe, matrix: Matrix) -> str:
    """How to go on: what caps apply, and sets with a name like one that no index has."""
    said = [
        f"On torch {made.row.torch} {cap.package} is as far as it goes: {cap.because}."
        for cap in caps_of(made.row.torch, matrix.caps)
        if any(Requirement(one).name == Requirement(cap.package).name for one in made.extras.names)
    ]
    if "no index has" in error.problem:
        said.append(f"Named sets: {nearest(error.problem.split()[-1], list(matrix.extras))}")
    return "\n  ".join([*said, error.remedy]).strip() or "Leave one out, or allow other versions."
