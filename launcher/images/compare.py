"""Compares what two images add to a base, by file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from launcher.oci.layers import OPAQUE, Entry, Layer
from launcher.screen import printable

ABSENT = "none"

Tree = dict[str, Entry]
"""What layers come to when they lie on each other: an entry for each absolute path."""

OF_CONTENT = {"kind", "size", "sha256", "target"}
OF_TIME = {"mtime", "header"}


@dataclass(frozen=True)
class Difference:
    """A path that isn't the same in image and rebuilt; None where nothing is added there."""

    path: str
    image: Entry | None
    rebuilt: Entry | None

    @property
    def names(self) -> list[str]:
        """The fields of Entry that differ."""
        one, other = self.image, self.rebuilt
        if one is None or other is None:
            return [] if one is other else ["kind"]
        names = [field.name for field in fields(Entry)]
        return [name for name in names if getattr(one, name) != getattr(other, name)]

    @property
    def rank(self) -> tuple[int, bool, str]:
        """What tells most comes first: content, then modes and owners, then times; last a folder.

        Of files with other content, those that only follow from others come later.
        """
        derived = self.path.endswith((".pyc", "/RECORD", "/build.json"))
        names, kinds = set(self.names), {one.kind for one in (self.image, self.rebuilt) if one}
        if names & OF_CONTENT:
            return 2 if kinds == {"folder"} else 0, derived, self.path
        return 2 if names <= OF_TIME else 1, derived, self.path


def merge(layers: Sequence[Layer]) -> Tree:
    """Lay layers on each other, lowest first; what one takes away stays as a `removed` entry."""
    tree: Tree = {}
    for layer in layers:
        # What a layer takes away is below it, wherever in the layer that stands.
        for path, entry in sorted(layer, key=lambda one: not _takes_away(*one)):
            if _takes_away(path, entry) or (path in tree and entry.kind != "folder"):
                _remove_below(tree, path.removesuffix(f"/{OPAQUE}"))
            tree[path] = entry
    return tree


def differences(image: Tree, rebuilt: Tree, times: bool = True) -> list[Difference]:
    """All paths that aren't the same in both, what tells most first.

    Without `times`, neither times nor the names of owners count: the classic builder writes its
    own.
    """
    found = [Difference(path, image.get(path), rebuilt.get(path)) for path in {**image, **rebuilt}]
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


def described(image: Entry | None, rebuilt: Entry | None) -> Iterator[str]:
    """A line for each field of two entries; two lines where they differ."""
    if image is None or rebuilt is None:
        yield f"nothing is added there in {'image' if image is None else 'rebuilt'}"
    there = [entry for entry in (image, rebuilt) if entry]
    for name in (field.name for field in fields(Entry)):
        shown = [_shown(name, getattr(entry, name)) for entry in there]
        if not any(shown):
            continue
        if len({getattr(entry, name) for entry in there}) == 1:
            yield f"{name:10} {shown[0]}"
        else:
            yield f"{name:10} image    {shown[0] or ABSENT}"
            yield f"{'':10} rebuilt  {shown[1] or ABSENT}"


def _takes_away(path: str, entry: Entry) -> bool:
    """Whether an entry is no file, but hides what the layers below have."""
    return entry.kind == "removed" or path.endswith(f"/{OPAQUE}")


def _remove_below(tree: Tree, folder: str) -> None:
    for path in [path for path in tree if path.startswith(f"{folder}/")]:
        del tree[path]


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


def _shown(name: str, value: Any) -> str:
    """A field's value for people."""
    if name == "mode":
        return f"{value:04o}"
    if name == "mtime":
        return datetime.fromtimestamp(value, timezone.utc).isoformat()
    if isinstance(value, tuple):
        return printable(", ".join(f"{key}={text}" for key, text in value))
    return printable(str(value))
