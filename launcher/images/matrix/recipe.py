"""All inputs of a build, exactly: the row, a release and the lock. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from launcher.base.errors import UsageError
from launcher.images.matrix.extras import NO_EXTRAS, Extras, extras_of
from launcher.images.matrix.locked import (
    ExtrasLock,
    Lock,
    LockedExtension,
    LockedImage,
    LockedRelease,
)
from launcher.images.matrix.matrix_file import find_release, find_row
from launcher.images.matrix.requirements import outdated, pinned_versions
from launcher.images.matrix.schema import (
    Extension,
    Interpreter,
    Matrix,
    MegatronRelease,
    Row,
    Source,
)

GLIBC = 28
"""Minor version of the glibc 2 of the builder, which is older than any base's."""
COMPILE = ("build", "extensions")
"""The groups of wheels that compile, of which none is in the image."""


@dataclass(frozen=True)
class Recipe:
    """What one row with one release is made of on one platform; equal ones give equal images.

    release: of the matrix; kind: where its source is from; builder: the matrix's name of the image
    that compiles; images: base and builder with what is locked of them, if anything; pins: wheels
    by the folder below wheels/ that they are installed from; extensions: in the order in which they
    are compiled; extras: what is added beside, whose pins and lock are there once they are resolved
    """

    tag: str
    row: Row
    release: str
    named: MegatronRelease
    locked: LockedRelease
    kind: Source
    platform: str
    builder: str
    images: Mapping[str, LockedImage | None]
    pins: Mapping[str, Sequence[str]]
    interpreter: Interpreter | None
    extensions: Mapping[str, tuple[Extension, LockedExtension]]
    extras: Extras = NO_EXTRAS
    extras_lock: ExtrasLock | None = None

    @property
    def wheels(self) -> list[str]:
        """The pins of all groups, each once."""
        return list(dict.fromkeys(pin for pins in self.pins.values() for pin in pins))

    @property
    def glibc(self) -> int:
        """Minor version of the glibc 2 that wheels may need; only extras need a newer one."""
        return max(GLIBC, self.extras_lock.glibc if self.extras_lock else 0)

    @property
    def added(self) -> list[str]:
        """The pins of what is in the image, each once."""
        return sorted({p for group in self.pins if group not in COMPILE for p in self.pins[group]})

    @property
    def extension_commits(self) -> list[str]:
        """The commits that its extensions are compiled from."""
        locked = [one for _, one in self.extensions.values()]
        return [git.commit for one in locked for git in (one.git, *one.submodules.values())]

    def lacks(self, files: Collection[str], commits: Collection[str]) -> list[str]:
        """What is not among files, by their sha256, and commits."""
        lacks = [pin.partition(" ")[0] for pin in self.wheels if sha256_of_pin(pin) not in files]
        if self.interpreter and self.interpreter.sha256 not in files:
            lacks.append(f"Python {self.row.python}")
        lacks += [f"commit {one}" for one in self.extension_commits if one not in commits]
        if self.kind == "git":
            here = self.locked.git is not None and self.locked.git.commit in commits
        else:
            here = self.locked.sdist is not None and self.locked.sdist.sha256 in files
        return lacks if here else [*lacks, f"Megatron {self.release}"]


def recipe(
    matrix: Matrix,
    lock: Lock,
    tag: str,
    release: str | None = None,
    platform: str | None = None,
    extras: Sequence[str] = (),
) -> Recipe:
    """The recipe of a row: with its own release, and on the first of its platforms unless named.

    extras: beside the row's own. Raises UsageError for an unknown row or release, one that doesn't
    fit, a platform that is not the row's, and for what the lock doesn't have or has older than the
    matrix asks for.
    """
    row = find_row(matrix, tag)
    version, platform = release or row.megatron, platform or row.platforms[0]
    named = find_release(matrix, row, version)
    if platform not in row.platforms:
        own = ", ".join(row.platforms)
        raise UsageError(f"{tag}: is not for {platform}", f"The row is for {own}.")
    key, added = row.compiled_by(platform), extras_of(matrix, row, extras)
    asked: list[tuple[str, str, Collection[str]]] = [
        ("needs", key, lock.needs),
        *([("packages", tag, lock.packages)] if row.packages else []),
        ("releases", version, lock.releases),
        *(("extensions", name, lock.extensions) for name in added.extensions),
    ]
    if missing := [f"{part} of {name}" for part, name, there in asked if name not in there]:
        raise UsageError(f"matrix.lock has no {', no '.join(missing)}", "Run `make lock`.")
    needs = lock.needs[key]
    for part, requirements in matrix.needs:
        _check_age(f"the matrix's {part} needs", requirements, getattr(needs, part))
    pins: dict[str, Sequence[str]] = {"build": needs.build, "runtime": needs.runtime}
    if row.packages:
        pins["packages"] = lock.packages[tag]
        check_packages(tag, row, lock.packages[tag])
    if added.extensions:
        pins["extensions"] = needs.extensions
    builder = matrix.builders[key]
    return Recipe(
        tag=tag,
        row=row,
        release=version,
        named=named,
        locked=lock.releases[version],
        kind=_kind(row, named),
        platform=platform,
        builder=builder,
        images={name: lock.images.get(name) for name in (row.base, builder)},
        pins=pins,
        interpreter=matrix.interpreters[row.interpreter] if row.interpreter else None,
        extensions={n: (matrix.extensions[n], lock.extensions[n]) for n in added.extensions},
        extras=added,
    )


def _kind(row: Row, release: MegatronRelease) -> Source:
    """What a row takes a release from: the row's own choice, where the release has that."""
    if row.source == "sdist" and release.sdist:
        return "sdist"
    return "git" if release.git.is_named else "sdist"


def check_packages(tag: str, row: Row, pins: Sequence[str]) -> None:
    """Raise UsageError where the lock of a row's packages is older than what the row asks for."""
    _check_age(f"the packages of {tag}", row.packages, pins)
    torch = pinned_versions(pins).get("torch", row.torch)
    if not torch.startswith(row.torch):
        raise UsageError(
            f"{tag}: the row says torch {row.torch}, and matrix.lock has {torch}",
            "Name the same torch in the row's `packages`, then run `make lock`.",
        )


def _check_age(what: str, requirements: Sequence[str], pins: Sequence[str]) -> None:
    if wanted := outdated(requirements, pins):
        raise UsageError(
            f"matrix.lock is older than {what}: {', '.join(wanted)}", "Run `make lock`."
        )


def sha256_of_pin(pin: str) -> str:
    """The hash in `name==version --hash=sha256:…`."""
    return pin.rpartition(":")[2]


def locked_hashes(lock: Lock) -> set[str]:
    """The sha256 of every file that the lock names."""
    needs = [pins for one in lock.needs.values() for _, pins in one]
    pins = (pin for some in [*needs, *lock.packages.values()] for pin in some)
    sdists = {one.sdist.sha256 for one in lock.releases.values() if one.sdist}
    return {sha256_of_pin(pin) for pin in pins} | sdists
