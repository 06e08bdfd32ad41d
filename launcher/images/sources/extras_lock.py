"""The extras of an image, resolved against what its base has, and the locks that keep the answer.

A lock is a small file that can be committed: extras/TAG/NAMES.PLATFORM.yaml beside matrix.yaml. One
that isn't there is made at the first build, in the site's own folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from launcher.base import files, owned, yamlfile
from launcher.base.errors import BuildError, nearest
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.matrix.extras import OWN_WHEEL, PROTECTED, suffix
from launcher.images.matrix.locked import ExtrasLock
from launcher.images.matrix.recipe import GLIBC, Recipe, sha256_of_pin
from launcher.images.matrix.requirements import outdated, pinned_versions
from launcher.images.matrix.schema import Matrix, caps_of
from launcher.images.sources import fetch, index
from launcher.images.sources.clash import NO_WHEEL
from launcher.images.sources.uv import RequirementSet, ResolvedSet, resolve

YEARS = timedelta(days=3 * 365)
HEADER = "# Written by `launcher image build --extras`. Remove it to have it resolved anew.\n"


@dataclass(frozen=True)
class Ground:
    """What extras are put on: an image with what else is added to it.

    base: its digest; packages: versions by normalised name; limits: the lines of its
    /etc/pip/constraint.txt; glibc: minor version of its glibc 2
    """

    base: str
    packages: Mapping[str, str]
    limits: Sequence[str] = ()
    glibc: int = GLIBC


def ground(
    base: str, packages: Mapping[str, str], limits: Sequence[str], glibc: str, made: Recipe
) -> Ground:
    """What a recipe's extras are put on, by what was seen in its base; glibc: 2.35.

    What Megatron needs is on it where the base has none of its own, and so is Megatron, which
    another one beside it would replace.
    """
    megatron = {"megatron-core": made.named.version or made.release}
    own = {**packages, **megatron, **pinned_versions(made.pins.get("packages", ()))}
    need = {n: v for n, v in pinned_versions(made.pins["runtime"]).items() if n not in own}
    minor = glibc.partition(".")[2]
    return Ground(base, {**own, **need}, limits, int(minor) if minor.isdigit() else GLIBC)


def is_of(lock: ExtrasLock, made: Recipe, limits: Sequence[str]) -> bool:
    """Whether a lock was made for a recipe's extras, under limits that hold still."""
    pinned = pinned_versions(lock.pins)
    still = [one for one in limits if canonicalize_name(Requirement(one).name) in pinned]
    own = (lock.platform, *lock.requirements) == (made.platform, *made.extras.packages)
    return own and not outdated(still, lock.pins)


def holds_on(lock: ExtrasLock, on: Ground) -> bool:
    """Whether a lock would come out the same on a base, its own or another, with what is added."""
    return (
        lock.glibc <= on.glibc
        and all(on.packages.get(name) == version for name, version in lock.rests_on.items())
        and not {*pinned_versions(lock.pins)} & {*on.packages}
    )


def with_lock(made: Recipe, lock: ExtrasLock) -> Recipe:
    """The recipe with the pins of its extras."""
    return replace(made, pins={**made.pins, "extras": lock.pins}, extras_lock=lock)


def settled(
    made: Recipe,
    matrix: Matrix,
    look: Callable[[], Ground] | None,
    site: Settings,
    progress: Progress,
) -> Recipe:
    """The recipe with its extras' pins: those of a lock that holds, else resolved now and kept.

    look: returns what they are put on; None where that isn't known, and a lock is taken as it is.
    Raises BuildError as `resolve_extras` does, and where there is neither.
    """
    if not made.extras.packages:
        return made
    lock = find_lock(made, matrix, site)
    if look is None:
        if lock is None:
            raise BuildError(
                f"{made.tag}: these extras have no lock here, and there is no base to look into",
                "Fetch it where a container engine answers, and without --no-images.",
            )
        return with_lock(made, lock)
    on = look()
    if lock is None or not holds_on(lock, on):
        progress.step(f"resolve {' '.join(made.extras.names)}")
        pip = index.Pip.configured(site)
        found = resolve_extras(made, matrix, on, site, pip)
        lock, old = lock_of(made, on, found), left_behind(found, made, pip)
        progress.close()
        at = keep_text(dump(lock), path_of(made), site)
        asked = {canonicalize_name(Requirement(one).name) for one in lock.requirements}
        own = (f"{n} {v}" for n, v in pinned_versions(lock.pins).items() if n in asked)
        progress.note(f"{made.tag}: the extras are locked in {at}: {', '.join(own)}")
        if old:
            why = "the base, matrix.yaml or another package allows no newer one"
            progress.note(f"{made.tag}: old packages among them: {', '.join(old)}; {why}")
    return with_lock(made, lock)


def path_of(made: Recipe) -> Path:
    """Where the lock of a recipe's extras lies, below a folder of such locks."""
    architecture = made.platform.partition("/")[2]
    return Path(made.tag, f"{suffix(made.extras.names)[1:]}.{architecture}.yaml")


def find_lock(made: Recipe, matrix: Matrix, site: Settings) -> ExtrasLock | None:
    """A recipe's lock of extras: beside the matrix, else the site's, or None. Raises UsageError."""
    limits = limits_of(made, matrix)
    for folder in (site.matrix.parent / "extras", site.extras):
        path = folder / path_of(made)
        lock = yamlfile.load(path, ExtrasLock) if path.is_file() else None
        if lock and is_of(lock, made, limits):
            return lock
    return None


def locked_hashes(site: Settings) -> set[str]:
    """The sha256 of every file that a lock of extras names. Raises UsageError as `find_lock`."""
    folders = (site.matrix.parent / "extras", site.extras)
    found = (yamlfile.load(path, ExtrasLock) for one in folders for path in one.glob("*/*.yaml"))
    return {sha256_of_pin(pin) for lock in found for pin in lock.pins}


def cached(lock: ExtrasLock, made: Recipe, site: Settings) -> Path:
    """A lock as a file of the cache, for what carries a build's inputs elsewhere."""
    with owned.scratch(site.cache) as folder:
        path = folder / path_of(made).name
        path.write_text(dump(lock), encoding="utf-8")
        return fetch.store(path, site)


def take(path: Path, site: Settings) -> None:
    """Put a lock from elsewhere into the site's folder, unless one is there. Raises UsageError."""
    lock = yamlfile.load(path, ExtrasLock)
    if not (site.extras / lock.tag / path.name).exists():
        keep_text(dump(lock), Path(lock.tag, path.name), site)


def keep_text(text: str, at: Path, site: Settings) -> Path:
    """Write the text of a lock into the site's own folder, below which `at` is."""
    path = site.extras / at
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, text)
    return path


def dump(lock: ExtrasLock) -> str:
    """The text of a lock."""
    data = lock.model_dump(mode="json")
    return HEADER + yamlfile.dump(data, width=200)


def limits_of(made: Recipe, matrix: Matrix) -> list[str]:
    """What limits packages by the row's torch and by Megatron, and not by their own metadata."""
    caps = [cap.package for cap in caps_of(made.row.torch, matrix.caps)]
    return [*caps, *(f"{name}{one.versions}" for name, one in made.named.needs_base.items())]


def resolve_extras(
    made: Recipe, matrix: Matrix, on: Ground, site: Settings, pip: index.Pip
) -> ResolvedSet:
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
        found = resolve(asked, site, pip)
        _check_protected(found.pins)
        _check_newest(made, found.pins, pip)
    except BuildError as error:
        raise BuildError(f"{what}: {error.problem}", _remedy(error, made, matrix)) from error
    return found


def lock_of(made: Recipe, on: Ground, found: ResolvedSet) -> ExtrasLock:
    """The lock of a recipe's extras, by what they were resolved to."""
    return ExtrasLock(
        tag=made.tag,
        base=on.base,
        platform=made.platform,
        glibc=on.glibc,
        requirements=list(made.extras.packages),
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


def _check_newest(made: Recipe, pins: Sequence[str], pip: index.Pip) -> None:
    """Raise BuildError where a package that is asked for is old since the newest has no wheel.

    Without a word, deepspeed would be the last one with a wheel, 0.3.1.dev3 of 2020.
    """
    chosen = pinned_versions(pins)
    for one in map(Requirement, made.extras.packages):
        name = canonicalize_name(one.name)
        found = index.newest_release(name, made.row.python, pip) if name in chosen else None
        newest, has_wheel = found or (Version("0"), True)
        if not has_wheel and newest in one.specifier and Version(chosen[name]) < newest:
            raise BuildError(
                f"{name} {newest}, the newest, {NO_WHEEL}; the newest with one is {chosen[name]}",
                f"Ask for that by {name}=={chosen[name]}. For the newest:\n  "
                + OWN_WHEEL.format(f"{name}=={newest}"),
            )


def left_behind(found: ResolvedSet, made: Recipe, pip: index.Pip) -> list[str]:
    """Packages that are years older than the newest beside them, and than their own newest wheel.

    None that is asked for as old. Beside an older base, trl was given datasets 1.1.1 of 2020.
    """
    wanted = [Requirement(one) for one in made.extras.packages]
    latest = max(found.times.values(), default=None)
    old = []
    for name, version in pinned_versions(found.pins).items():
        if latest and name in found.times and latest - found.times[name] > YEARS:
            newest, has_wheel = index.newest_release(name, made.row.python, pip) or (None, False)
            own = (one.specifier for one in wanted if canonicalize_name(one.name) == name)
            if newest and has_wheel and Version(version) < newest and all(newest in o for o in own):
                old.append(f"{name} {version} (newest: {newest})")
    return old


def _remedy(error: BuildError, made: Recipe, matrix: Matrix) -> str:
    """How to go on: the cap that stands against it, a wheel of one's own, sets of a like name."""
    said = [
        f"On torch {made.row.torch} {cap.package} is as far as it goes: {cap.because}."
        for cap in caps_of(made.row.torch, matrix.caps)
        if error.problem.endswith(cap.package)
    ]
    if error.problem.endswith(NO_WHEEL):
        named = error.problem.removesuffix(NO_WHEEL).removesuffix(", which ").split()
        said.append(OWN_WHEEL.format(named[-1]))
    if "no index has" in error.problem:
        names = [*matrix.extras, *(name for one in matrix.extras.values() for name in one.packages)]
        said.append(nearest(error.problem.split()[-1], names))
    return "\n  ".join([*said, error.remedy]).strip() or "Leave one out, or allow other versions."
