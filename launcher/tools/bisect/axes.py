"""The differences of two ends as axes, and the run at a point of them. Pure.

Their order is that in which causes are sought: base, extras, release, commits, keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from packaging.version import Version

from launcher.images.matrix.schema import Matrix
from launcher.runs.records import provenance
from launcher.runs.runfile.secrets import HIDDEN, is_secret, is_secret_option
from launcher.tools.bisect.checkouts import Checkout
from launcher.tools.bisect.ends import End, RowBuild
from launcher.tools.bisect.halving import Point

BASE, IMAGE, PACKAGE, RELEASE, COMMIT, KEY, ARGUMENTS, FOLDER = (
    *("base", "image", "package", "release", "commit", "key", "arguments", "folder"),
)
"""Kinds of axes."""

BUILT = (BASE, PACKAGE, RELEASE)
"""Those for which an image is built for each point."""

UNSET = None
"""The value of a package that isn't there, and of a key that isn't set."""

LAYOUT = ("gpus", "processes", "nodes", "parallel")
BATCHES = ("training.micro_batch_size", "training.global_batch_size")
"""Keys that have to fit each other stand together, so that few points between can't be tried."""

OWN = ("name", "source", "image", "profile", "checkpoint.save", "logging.wandb", "logging.tensor")
"""What a trial has in its own way, or another axis has; a folder to save to has another name."""

NGC = re.compile(r"\d\d\.\d\d")


@dataclass(frozen=True)
class Axis:
    """What differs, from GOOD's value to BAD's, with all that lie between."""

    kind: str
    name: str
    values: tuple[Any, ...]

    @property
    def steps(self) -> int:
        return len(self.values) - 1

    def told(self, at: int) -> str:
        """The value at a position, in words."""
        value = self.values[at]
        if self.kind == KEY and is_secret_key(self.name, value):
            return HIDDEN
        if value is UNSET:
            return "none" if self.kind == PACKAGE else "not set"
        return str(value.get("name") or value["tag"]) if self.kind == IMAGE else str(value)


@dataclass(frozen=True)
class Candidate:
    """A run to be tried.

    image: as a run file names it, where it needs no build; else `build`, with the exact `packages`
    in place of its extras where these differ. checkout: what runs in place of the image's Megatron.
    """

    config: Mapping[str, Any]
    cwd: str
    rest: tuple[str, ...]
    image: Mapping[str, Any]
    build: RowBuild | None
    packages: Mapping[str, str] | None
    checkout: Checkout | None


@dataclass(frozen=True)
class Differences:
    """The axes from `start`, GOOD, to BAD; and what differs and can't be tried, a reason each."""

    start: Candidate
    axes: tuple[Axis, ...]
    untried: tuple[str, ...] = ()

    @property
    def end(self) -> Point:
        """BAD."""
        return tuple(axis.steps for axis in self.axes)

    def at(self, point: Point) -> Candidate:
        """The run at a point."""
        found = self.start
        for axis, at in zip(self.axes, point, strict=True):
            found = _changed(found, axis, axis.values[at]) if at else found
        return found

    def told(self, point: Point) -> str:
        """A point in words: how far it is on each axis from GOOD to BAD."""
        if not any(point):
            return "GOOD"
        if point == self.end:
            return "BAD"
        pairs = [*zip(self.axes, point, strict=True)]
        parts = list[str]()
        for kind in dict.fromkeys(axis.kind for axis, at in pairs if at):
            mine = [(axis, at) for axis, at in pairs if axis.kind == kind]
            last = [f"{axis.name} {axis.told(at)}".strip() for axis, at in mine if at][-1]
            done, steps = sum(at for _, at in mine), sum(axis.steps for axis, _ in mine)
            one = f"BAD's {kind} {last}"
            parts.append(one if done == 1 else f"{done} of BAD's {steps} {kind}s, up to {last}")
        return "GOOD with " + ", ".join(parts)


def _changed(found: Candidate, axis: Axis, value: Any) -> Candidate:
    """The candidate with a value of an axis."""
    if axis.kind == COMMIT:
        return replace(found, checkout=value)
    if axis.kind == IMAGE:
        return replace(found, image=value)
    if axis.kind == FOLDER:
        return replace(found, cwd=value)
    if axis.kind == ARGUMENTS:
        return replace(found, rest=value)
    if axis.kind == PACKAGE:
        packages = _without(dict(found.packages or {}), (axis.name,))
        return replace(
            found, packages=packages if value is UNSET else packages | {axis.name: value}
        )
    if axis.kind in (BASE, RELEASE):
        assert found.build
        field = "tag" if axis.kind == BASE else "release"
        return replace(found, build=replace(found.build, **{field: value}))
    keys = tuple(axis.name.split(".", 1))
    config = dict(found.config)
    return replace(
        found, config=_without(config, keys) if value is UNSET else _with(config, keys, value)
    )


def is_secret_key(key: str, value: Any) -> bool:
    """Whether a key's value may be a secret: a variable's, or an option's."""
    section, _, name = key.partition(".")
    if section == "env":
        return is_secret(name, value)
    return section == "megatron_args" and is_secret_option(name, value)


def between(
    good: End,
    bad: End,
    matrix: Matrix,
    commits: Sequence[Checkout | None],
    packages: tuple[Mapping[str, str], Mapping[str, str]] | None,
    *,
    contained: bool,
) -> Differences:
    """What lies between two ends.

    commits: the checkouts from GOOD's to BAD's; packages: the versions of the extras of both,
    where they differ; contained: whether the backend runs images at all
    """
    axes, untried = list[Axis](), list[str]()
    images = [*_images(good, bad, matrix, packages)]
    if contained:
        axes += images
    else:
        pairs = [(one.kind, one.told(0), one.told(-1)) for one in images]
        extras = [" ".join(one.build.extras) if one.build else "" for one in (good, bad)]
        pairs += [("extras", extras[0], extras[1])] if extras[0] != extras[1] else []
        untried += [f"{kind} {a} → {b}: this backend runs no image" for kind, a, b in pairs]
    if len({*commits}) > 1:
        axes.append(Axis(COMMIT, "", tuple(commits)))
    axes += _keys(good, bad)
    if good.rest != bad.rest:
        axes.append(Axis(ARGUMENTS, "after --", (good.rest, bad.rest)))
    if good.cwd != bad.cwd:
        axes.append(Axis(FOLDER, "it starts in", (good.cwd, bad.cwd)))
    untried += _unlike(good.facts, bad.facts)
    built = any(axis.kind in BUILT for axis in axes)
    start = Candidate(
        config=_without(good.config.model_dump(mode="json", exclude_unset=True), ("image",)),
        cwd=good.cwd,
        rest=good.rest,
        image=good.config.image.model_dump(mode="json", exclude_unset=True),
        build=good.build if built else None,
        packages=packages[0] if packages and built else None,
        checkout=good.checkout,
    )
    return Differences(start, tuple(axes), tuple(untried))


def _images(
    good: End,
    bad: End,
    matrix: Matrix,
    packages: tuple[Mapping[str, str], Mapping[str, str]] | None,
) -> Iterator[Axis]:
    first, last = good.build, bad.build
    if first is None or last is None:
        names = [
            one.config.image.model_dump(mode="json", exclude_unset=True) for one in (good, bad)
        ]
        if names[0] != names[1]:
            yield Axis(IMAGE, "", tuple(names))
        return
    if first.tag != last.tag:
        yield Axis(BASE, "", rows_between(first.tag, last.tag, matrix))
    for name in sorted({*(packages or ({}, {}))[0], *(packages or ({}, {}))[1]}):
        assert packages
        pair = packages[0].get(name, UNSET), packages[1].get(name, UNSET)
        if pair[0] != pair[1]:
            yield Axis(PACKAGE, name, pair)
    if first.release != last.release:
        yield Axis(RELEASE, "", releases_between(first.release, last.release, matrix))


def rows_between(first: str, last: str, matrix: Matrix) -> tuple[str, ...]:
    """NGC's tags from one to the other, either way; of other rows the two alone."""
    if not (NGC.fullmatch(first) and NGC.fullmatch(last)):
        return first, last
    return _stretch(first, last, sorted(tag for tag in matrix.rows if NGC.fullmatch(tag)))


def releases_between(first: str, last: str, matrix: Matrix) -> tuple[str, ...]:
    """The matrix's releases from one to the other, either way; both are among them."""
    return _stretch(first, last, sorted({*matrix.releases, first, last}, key=Version))


def _stretch(first: str, last: str, known: list[str]) -> tuple[str, ...]:
    one, other = known.index(first), known.index(last)
    return tuple(known[one : other + 1] if one < other else known[other : one + 1][::-1])


def _keys(good: End, bad: End) -> Iterator[Axis]:
    """The keys whose values differ, defaults filled in; those of the layout last."""
    given = [leaves(end.config.model_dump(mode="json", exclude_unset=True)) for end in (good, bad)]
    whole = [leaves(end.config.model_dump(mode="json")) for end in (good, bad)]
    names = [key for key in {**whole[0], **whole[1]} if not key.startswith(OWN)]
    for key in sorted(names, key=lambda key: (_is_layout(key), key)):
        values = [one.get(key, UNSET) for one in whole]
        if values[0] != values[1] and not _has_parts(key, names):
            yield Axis(KEY, key, tuple(one.get(key, UNSET) for one in given))


def _is_layout(key: str) -> bool:
    return key.partition(".")[0] in LAYOUT or key in BATCHES


def _has_parts(key: str, names: Sequence[str]) -> bool:
    """Whether it is a section that is there on one side alone: its keys differ already."""
    return any(name.startswith(f"{key}.") for name in names)


def leaves(data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run file by dotted names: those of a section by section.key."""
    found = dict[str, Any]()
    for key, value in data.items():
        inner = value if isinstance(value, dict) and value else None
        found |= {key: value} if inner is None else {f"{key}.{one}": inner[one] for one in inner}
    return found


def _with(data: Mapping[str, Any], keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A nested mapping with a value under `keys`."""
    first, *rest = keys
    below = data.get(first)
    inner = below if isinstance(below, dict) else {}
    return {**data, first: _with(inner, tuple(rest), value) if rest else value}


def _without(data: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    """A nested mapping without what is under `keys`."""
    first, *rest = keys
    if not rest or not isinstance(data.get(first), dict):
        return {key: value for key, value in data.items() if key != first}
    return {**data, first: _without(data[first], tuple(rest))}


def _unlike(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What two runs on record had otherwise, and no trial can have: data, GPUs, the launcher."""
    if not (then and now):
        return []
    return provenance.changed({**then, "image": now["image"], "source": now["source"]}, now)
