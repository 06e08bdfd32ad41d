"""Compares what two images add to a base: by file, and within the first file that differs."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from itertools import zip_longest
from typing import IO, Any

from launcher.oci.layers import OPAQUE, Entry, Layer
from launcher.screen import printable

BLOCK = 1 << 16
WIDTH = 96  # characters of a line of text that is shown
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
        return differing(self.image, self.rebuilt)

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


@dataclass(frozen=True)
class Place:
    """Where two files part: the first byte that differs, from 0, and in text its line, from 1.

    image, rebuilt: the byte there, None past a file's end; lines: that line, in both
    """

    offset: int
    image: int | None
    rebuilt: int | None
    line: int | None = None
    lines: tuple[str, str] = ("", "")


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


def differing(one: Entry | None, other: Entry | None) -> list[str]:
    """The names of the fields in which two entries differ."""
    if one is None or other is None:
        return [] if one is other else ["kind"]
    names = [field.name for field in fields(Entry)]
    return [name for name in names if getattr(one, name) != getattr(other, name)]


def unlike(image: Sequence[Layer], rebuilt: Sequence[Layer]) -> str:
    """Why layers that come to the same files aren't the same bytes."""
    if len(image) != len(rebuilt):
        return f"they are in {len(image)} layers, and in {len(rebuilt)} of the rebuilt one"
    for number, (ours, theirs) in enumerate(zip(image, rebuilt, strict=True), start=1):
        for place, (one, other) in enumerate(zip_longest(ours, theirs), start=1):
            if one != other:
                paths = " and ".join(
                    printable(pair[0]) if pair else ABSENT for pair in (one, other)
                )
                return f"layer {number} has them in another order, from entry {place} on: {paths}"
    return "the layers' tar files differ in what no entry shows"


def parting(image: IO[bytes], rebuilt: IO[bytes]) -> Place | None:
    """Where two files part, None where they are the same. Both are read from their beginning."""
    offset, line, start = 0, 1, 0
    while True:
        one, other = image.read(BLOCK), rebuilt.read(BLOCK)
        same = _common(one, other)
        line += one.count(b"\n", 0, same)
        if (end := one.rfind(b"\n", 0, same)) >= 0:
            start = offset + end + 1
        if one != other:
            break
        if not one:
            return None
        offset += same
    there = [block[same] if same < len(block) else None for block in (one, other)]
    place = Place(offset + same, there[0], there[1])
    around = [_line(file, start) for file in (image, rebuilt)]
    if not any(map(_is_text, around)):
        return place
    lines = [_window(part, place.offset - start) for part in around]
    return replace(place, line=line, lines=(lines[0], lines[1]))


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
        sides = (("image", image), ("rebuilt", rebuilt))
        yield next(f"nothing there in {name}" for name, entry in sides if entry is None)
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


def parted(place: Place | None) -> Iterator[str]:
    """Lines about the place where two files part."""
    if place is None:
        return
    there = [ABSENT if byte is None else f"0x{byte:02x}" for byte in (place.image, place.rebuilt)]
    end = " (none: the file ends there)" if ABSENT in there else ""
    yield f"{'byte':10} {place.offset}: image {there[0]}, rebuilt {there[1]}{end}"
    if place.line is not None:
        yield f"{'line':10} {place.line}"
        yield f"{'':10} image    {place.lines[0]}"
        yield f"{'':10} rebuilt  {place.lines[1]}"


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


def _common(one: bytes, other: bytes) -> int:
    """How many bytes two blocks begin with alike, by bisection: whole slices compare fast."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _line(file: IO[bytes], start: int) -> bytes:
    """The line that begins at `start`, or as much of it as a line of text may have."""
    file.seek(start)
    return file.readline(BLOCK).rstrip(b"\r\n")


def _is_text(line: bytes) -> bool:
    """Whether a line is UTF-8, but for a character that is cut at its end, and has no NUL."""
    try:
        getincrementaldecoder("utf-8")().decode(line)
    except UnicodeDecodeError:
        return False
    return b"\0" not in line


def _window(line: bytes, offset: int) -> str:
    """What is near a byte of a line, to be shown."""
    text, before = (part.decode(errors="backslashreplace") for part in (line, line[:offset]))
    first = max(0, len(before) - WIDTH // 2)
    return printable(text[first : first + WIDTH])


def _shown(name: str, value: Any) -> str:
    """A field's value for people."""
    if name == "mode":
        return f"{value:04o}"
    if name == "mtime":
        return datetime.fromtimestamp(value, timezone.utc).isoformat()
    if isinstance(value, tuple):
        return printable(", ".join(f"{key}={text}" for key, text in value))
    return printable(str(value))
