"""Compares by file what two images add to a base; diffoscope shows the difference in a file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from launcher.images.oci.image_layers import LayerEntries, LayerEntry

ABSENT = "none"

OF_CONTENT = {"kind", "size", "sha256", "target"}
OF_TIME = {"mtime", "header"}


@dataclass(frozen=True)
class Difference:
    """A path that isn't the same in image and rebuilt; None where nothing is added there."""

    path: str
    image: LayerEntry | None
    rebuilt: LayerEntry | None

    @property
    def names(self) -> list[str]:
        """The fields of Entry that differ."""
        one, other = self.image, self.rebuilt
        if one is None or other is None:
            return [] if one is other else ["kind"]
        names = [field.name for field in fields(LayerEntry)]
        return [name for name in names if getattr(one, name) != getattr(other, name)]

    @property
    def rank(self) -> tuple[int, bool, str]:
        """The most important first: content, then modes and owners, then times; last a folder.

        Of files with other content, those that only follow from others come later.
        """
        derived = self.path.endswith((".pyc", "/RECORD", "/build.json"))
        names, kinds = set(self.names), {one.kind for one in (self.image, self.rebuilt) if one}
        if names & OF_CONTENT:
            return 2 if kinds == {"folder"} else 0, derived, self.path
        return 2 if names <= OF_TIME else 1, derived, self.path

    def told(self) -> Iterator[str]:
        """A line for each field that differs, with both values."""
        if self.image is None or self.rebuilt is None:
            yield f"nothing is added there in {'rebuilt' if self.image else 'image'}"
            return
        for name in self.names:
            one, other = getattr(self.image, name), getattr(self.rebuilt, name)
            yield f"{name}: {one or ABSENT} in image, {other or ABSENT} in rebuilt"


def differences(
    image: Iterable[LayerEntries], rebuilt: Iterable[LayerEntries], times: bool = True
) -> list[Difference]:
    """All paths that aren't the same in both images' layers, the most important first.

    Layers come lowest first; what one takes away is a `removed` entry. Without
    `times`, neither times nor the names of owners count: the classic builder writes its own.
    """
    one, other = ({path: it for layer in some for path, it in layer} for some in (image, rebuilt))
    found = [Difference(path, one.get(path), other.get(path)) for path in {**one, **other}]
    ignored = set() if times else OF_TIME
    return sorted((one for one in found if set(one.names) - ignored), key=lambda one: one.rank)


def values(image: Any, rebuilt: Any) -> list[tuple[str, str, str]]:
    """Where two values as JSON has them differ: the keys that lead there, and what both have."""
    ours, theirs = dict(_leaves(image)), dict(_leaves(rebuilt))
    return [
        (name, ours.get(name, ABSENT), theirs.get(name, ABSENT))
        for name in sorted({**ours, **theirs})
        if ours.get(name) != theirs.get(name)
    ]


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """What isn't empty in a value as JSON has it, by the keys that lead there."""
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key], f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from _leaves(item, f"{name}[{place}]")
    elif value not in (None, "", False):
        yield name, str(value)
