"""A hundred saved folders that somebody made up: each is refused in words, or loaded as it is.

Their hashes are right, so nothing but their contents can tell; or what lies there is no file.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import LauncherError
from launcher.images.carry import bundle
from launcher.images.carry.load import load
from launcher.images.oci import oci_layout
from tests.images.carry.conftest import BASE_LAYERS, Engine, filled
from tests.images.carry.test_save import QUIET, contents, saved

from .conftest import bounded, put

DEEP = b"[" * 100_000
ODD = [
    *(None, True, 0, -1, 1e400, 10**30, "", "x", "\x1b]0;x\x07", "\ud800", "../../etc/passwd", "/"),
    *([], {}, [None], {"": None}, ["a"] * 3000, "x" * 100_000, f"sha256:{'0' * 64}", "sha256:../x"),
]
OTHERS = [*"-v/:/host a;reboot $(reboot) A:1 a a: :a /".split(), "\x1b[2J:1", "a:1\nb:1"]


@dataclass
class Stick:
    """A saved image in memory: its files, and its list as JSON."""

    files: dict[str, bytes]
    listing: dict[str, Any]

    def blob(self, which: str) -> Any:
        """The JSON of the blob that the list names as its `image` or `manifest`."""
        return json.loads(self.files[oci_layout.blob_path(self.listing[which])])

    def replace(self, which: str, content: bytes) -> None:
        """Another one in its place, named by its sha256, in the list and in the manifest."""
        old, new = self.listing[which], oci_layout.sha256(content)
        del self.files[oci_layout.blob_path(old)]
        self.files[oci_layout.blob_path(new)] = content
        self.listing[which] = new
        if which == "image":
            manifest = self.files[oci_layout.blob_path(self.listing["manifest"])]
            self.replace("manifest", manifest.replace(old.encode(), new.encode()))

    def edit(self, which: str, change: Callable[[Any], Any]) -> None:
        """The same, of which one value was changed."""
        self.replace(which, json.dumps(change(self.blob(which))).encode())

    def write(self, folder: Path) -> None:
        """Put it into a folder, with the right sizes and hashes where none were made up."""
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        if self.listing.get("files") is None:
            digests = {path: oci_layout.sha256(self.files[path])[7:] for path in sorted(self.files)}
            self.listing["files"] = [
                {"path": path, "size": len(self.files[path]), "sha256": digest}
                for path, digest in digests.items()
            ]
        self.sign(folder)

    def sign(self, folder: Path) -> None:
        """Write the list with its own sha256, and the hashes of all."""
        own = oci_layout.sha256(_text(self.listing | {"sha256": ""}))[7:]
        text = _text(self.listing | {"sha256": own})
        (folder / oci_layout.LISTING).write_bytes(text)
        listing = oci_layout.parse(text, oci_layout.Listing)
        if listing is not None:
            (folder / oci_layout.SUMS).write_bytes(oci_layout.sums(listing))


def _text(listing: dict[str, Any]) -> bytes:
    return (json.dumps(listing, indent=1, sort_keys=True) + "\n").encode()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Stick:
    """A whole image, as `image save` writes it."""
    folder = tmp_path_factory.mktemp("original")
    saved(filled(), folder)
    files = contents(folder)
    listing = json.loads(files.pop(oci_layout.LISTING))
    del files[oci_layout.SUMS], listing["sha256"]
    return Stick(files, listing | {"files": None})


@pytest.fixture
def stick(original: Stick) -> Stick:
    """One to be changed."""
    return copy.deepcopy(original)


def attack(folder: Path, all_tags: bool = False) -> None:
    """Load it into an engine that has the base and an image of somebody else."""
    engine = Engine()
    engine.add("base:1", BASE_LAYERS)
    other = engine.add("docker.io/library/python:3", (b"other",))
    with bounded():
        try:
            load(engine, folder, QUIET, all_tags=all_tags)
        except LauncherError as error:
            assert str(error)
    assert other.id in engine.images
    assert all_tags or other.names == ["docker.io/library/python:3"]


def test_what_is_attacked_is_loaded_unless_it_was_changed(stick: Stick, tmp_path: Path) -> None:
    stick.write(tmp_path)
    engine = Engine()
    assert load(engine, tmp_path, QUIET).names == ("megatron:24.10", "megatron:24.10-0.9.0")


def _places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value below one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in inner:
        yield (*where, key)
        if isinstance(below, dict | list):
            yield from _places(below, (*where, key))


def changed(value: Any, dice: random.Random) -> Any:
    """A value of JSON in which one is another, or is gone."""
    *where, last = dice.choice(list(_places(value)))
    at = value
    for key in where:
        at = at[key]
    if dice.random() < 0.2:
        del at[last]
    else:
        at[last] = dice.choice(ODD)
    return value


@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("which", ["manifest", "image"])
def test_a_manifest_and_a_configuration_with_an_odd_value(
    stick: Stick, tmp_path: Path, which: str, number: int
) -> None:
    """json.loads(…)["rootfs"]["diff_ids"] of it was a traceback in 17 of 45."""
    dice = random.Random(13 + number)  # noqa: S311
    stick.edit(which, lambda value: changed(value, dice))
    stick.write(tmp_path)
    attack(tmp_path)


@pytest.mark.parametrize("which", ["manifest", "image"])
@pytest.mark.parametrize("content", [b"", b"null", b"[]", b"\xff", DEEP, b"1" * 5000, b'"\\ud800"'])
def test_a_manifest_and_a_configuration_that_are_none(
    stick: Stick, tmp_path: Path, which: str, content: bytes
) -> None:
    stick.replace(which, content)
    stick.write(tmp_path)
    attack(tmp_path)


@pytest.mark.parametrize("number", range(20))
def test_a_list_with_an_odd_value(stick: Stick, tmp_path: Path, number: int) -> None:
    dice = random.Random(13 + number)  # noqa: S311
    stick.write(tmp_path)
    stick.listing = changed(stick.listing, dice)
    stick.sign(tmp_path)
    attack(tmp_path, all_tags=number % 2 == 0)


@pytest.mark.parametrize("text", [b"", b"null", b"[]", b"\xff", DEEP, b'{"sha256": null}'])
def test_a_list_that_is_none(stick: Stick, tmp_path: Path, text: bytes) -> None:
    stick.write(tmp_path)
    (tmp_path / oci_layout.LISTING).write_bytes(text)
    attack(tmp_path)


@pytest.mark.parametrize("name", OTHERS)
def test_a_name_that_is_no_image_s(stick: Stick, tmp_path: Path, name: str) -> None:
    """It becomes a tag, a line on the terminal, and a command to paste."""
    stick.listing["names"] = [name]
    stick.write(tmp_path)
    attack(tmp_path, all_tags=True)
    base = {"name": name, "id": f"sha256:{'0' * 64}", "digests": [name], "layers": []}
    stick.listing |= {"names": ["megatron:1"], "base": base}
    stick.sign(tmp_path)
    attack(tmp_path)


KINDS = ("pipe", "endless", "elsewhere", "folder", "sparse", "socket")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "of", [oci_layout.LISTING, oci_layout.SUMS, "blobs", "documents", oci_layout.INDEX]
)
def test_what_lies_there_is_no_file(stick: Stick, tmp_path: Path, of: str, kind: str) -> None:
    """Pipes were waited for; what has no end, or a terabyte of nothing, was read for ever."""
    folder, elsewhere = tmp_path / "stick", tmp_path / "elsewhere"
    folder.mkdir()
    stick.write(folder)
    found = folder / of
    path = next(iter(sorted(found.iterdir()))) if found.is_dir() else found
    path = next(iter(sorted(path.iterdir()))) if path.is_dir() else path
    path.rename(elsewhere)
    put(path, kind, elsewhere)
    attack(folder)


@pytest.mark.parametrize("of", ["blobs", "blobs/sha256", "documents"])
def test_a_folder_that_is_a_link_is_not_followed(stick: Stick, tmp_path: Path, of: str) -> None:
    folder = tmp_path / "stick"
    folder.mkdir()
    stick.write(folder)
    (folder / of).rename(tmp_path / "elsewhere")
    (folder / of).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LauncherError, match="a link leads there"):
        load(Engine(), folder, QUIET)


def test_more_layers_than_any_image_has(stick: Stick, tmp_path: Path) -> None:
    def many(value: Any) -> Any:
        return value | {"layers": value["layers"] * 5000}

    stick.edit("manifest", many)
    stick.write(tmp_path)
    attack(tmp_path)


@pytest.mark.parametrize("of", ["documents/provenance.json", "manifest", "image"])
def test_what_is_small_is_not_large(stick: Stick, tmp_path: Path, of: str) -> None:
    """It was read into memory, however large it was."""
    much = oci_layout.LARGEST + 1
    if of in stick.files:
        stick.files[of] = bytes(much)
    else:
        stick.replace(of, json.dumps(stick.blob(of)).encode() + b" " * much)
    stick.write(tmp_path)
    engine = Engine()
    with pytest.raises(LauncherError, match=f"more than {oci_layout.LARGEST} bytes"):
        load(engine, tmp_path, QUIET)
    assert not engine.images


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "sparse", "socket"])
def test_a_bundle_whose_list_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """`fetch --from` waited for a pipe."""
    put(tmp_path / bundle.INDEX, kind, tmp_path)
    with bounded(), pytest.raises(LauncherError, match=r"damaged.*\n  bundle\.json"):
        bundle.check_bundle(tmp_path, QUIET)
