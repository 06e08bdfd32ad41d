"""Layers read from what engines save, and any file that was changed in them found and named."""

from __future__ import annotations

import bz2
import copy
import gzip
import hashlib
import io
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import EngineError
from launcher.images import compare
from launcher.oci.layers import Entry, Layer, read_layer, read_layers
from launcher.zstd import zstd

from .conftest import FORMS, Engine, sha256

FILE = Entry("file", "0644", "0:0", 3, 0, sha256="a" * 64)
FOLDER = Entry("folder", "0755", "0:0", 0, 0)


def tarred(*members: tuple[tarfile.TarInfo, bytes], pax: bool = True) -> bytes:
    written = io.BytesIO()
    kind = tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    with tarfile.open(fileobj=written, mode="w", format=kind) as tar:
        for member, content in members:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return written.getvalue()


def member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in {"mode": 0o644, **fields}.items():
        setattr(info, key, value)
    return info


def folder(name: str) -> tuple[tarfile.TarInfo, bytes]:
    return member(name, type=tarfile.DIRTYPE, mode=0o755), b""


def layer(*members: tuple[tarfile.TarInfo, bytes]) -> Layer:
    return read_layer(io.BufferedReader(io.BytesIO(tarred(*members))))[1]


# What engines save

NO_TAR = b"\xff" * 2048  # would fail where it was read


def saving(form: str, contents: list[bytes], packed: Callable[[bytes], bytes] = bytes) -> Engine:
    """An engine with an image of these layers, which it gives packed."""
    engine = Engine(form)
    engine.add("image:1", contents)
    engine.layers = {diff_id: packed(content) for diff_id, content in engine.layers.items()}
    return engine


def layers_of(engine: Engine, known: int = 0) -> dict[str, Layer]:
    diff_ids = engine.find("image:1").diff_ids
    return read_layers(engine.save("image:1", 1000), diff_ids, diff_ids[:known])


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_all_formats_are_read_and_those_below_are_passed_over(form: str) -> None:
    added = [tarred((member("opt/a"), b"a")), tarred((member("opt/b"), b"b"))]
    engine = saving(form, [NO_TAR, *added])
    _, first, second = engine.find("image:1").diff_ids
    found = layers_of(engine, 1)
    assert [found[one][0][0] for one in (first, second)] == ["/opt/a", "/opt/b"]
    assert form == "packed" or list(layers_of(engine, 2)) == [second]


PACKINGS = {
    "gzip": gzip.compress,
    "zstd": zstd.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_layers_are_known_by_what_is_in_them_and_damaged_ones_told(packing: str) -> None:
    plain = tarred((member("opt/a"), bytes(range(256)) * 20))
    found = layers_of(saving("oci", [plain], PACKINGS[packing]))
    assert [path for path, _ in found[sha256(plain)]] == ["/opt/a"]
    with pytest.raises(EngineError, match="can't be read"):
        layers_of(saving("oci", [plain], lambda content: PACKINGS[packing](content)[:-9]))


def test_a_layer_packed_as_python_cannot_read_it_is_left_out() -> None:
    lz4, plain = b"\x04\x22\x4d\x18" + NO_TAR, tarred((member("opt/a"), b"a"))
    assert list(layers_of(saving("oci", [lz4, plain]))) == [sha256(plain)]


def test_a_stream_that_ends_early_is_told() -> None:
    engine = saving("oci", [tarred((member("opt/a"), b"a" * 5000))])
    engine.ends = 3000
    with pytest.raises(EngineError, match="can't be read"):
        layers_of(engine)


def test_an_entry_holds_all_that_its_header_says() -> None:
    special = member("./dev/x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
    capable = member("bin/ping", mode=0o4755, uid=1, gid=2, mtime=7, uname="u", gname="g")
    capable.pax_headers = {"SCHILY.xattr.security.capability": "x", "comment": "c"}
    link = member("lib", type=tarfile.SYMTYPE, linkname="usr/lib")
    found = dict(layer((special, b""), (capable, b"abc"), (link, b""), (member("a/.wh.b"), b"")))
    assert found["/dev/x"].target == "1:3"
    assert found["/bin/ping"] == Entry(
        "file",
        "4755",
        "1:2",
        3,
        7,
        sha256=hashlib.sha256(b"abc").hexdigest(),
        attributes=(("security.capability", "x"),),
        header=(("comment", "c"), ("group", "g"), ("user", "u")),
    )
    assert (found["/lib"].kind, found["/lib"].target) == ("symbolic link", "usr/lib")
    assert found["/a/b"].kind == "removed"


# Trees

NAMES = st.text("abc.", min_size=1, max_size=4).filter(lambda name: name.strip("."))
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
ENTRIES = st.builds(
    member,
    PATHS,
    mode=st.sampled_from([0o644, 0o755]),
    mtime=st.integers(0, 3),
    uid=st.integers(0, 1),
    type=st.sampled_from([tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE]),
)
CONTENTS = st.binary(max_size=8)


@st.composite
def trees(draw: st.DrawFn) -> list[tuple[tarfile.TarInfo, bytes]]:
    entries = draw(st.lists(st.tuples(ENTRIES, CONTENTS), min_size=1, max_size=8))
    return list(
        {one.name: (one, content if one.isreg() else b"") for one, content in entries}.values()
    )


def changed(
    draw: st.DrawFn, one: tarfile.TarInfo, content: bytes
) -> list[tuple[tarfile.TarInfo, bytes]]:
    """The same entry with one thing changed, or none where it is taken away."""
    one = copy.copy(one)
    changes = ["mode", "owner", "time", "gone", "type"] + (["content"] if one.isreg() else [])
    match draw(st.sampled_from(changes)):
        case "mode":
            one.mode ^= 0o002
        case "owner":
            one.gid += 1
        case "time":
            one.mtime += 1
        case "gone":
            return []
        case "type":
            one.type = tarfile.FIFOTYPE
            content = b""
        case "content":
            content = content + b"x"
    return [(one, content)]


@given(st.data(), trees())
def test_any_change_of_any_file_is_named_and_no_other_path_is(
    data: st.DataObject, members: list[tuple[tarfile.TarInfo, bytes]]
) -> None:
    place = data.draw(st.integers(0, len(members) - 1))
    other = copy.copy(members)
    other[place : place + 1] = changed(data.draw, *members[place])
    found = compare.differences([layer(*members)], [layer(*other)])
    assert [difference.path for difference in found] == [f"/{members[place][0].name}"]
    assert not compare.differences([layer(*members)], [layer(*members)])


def test_what_a_layer_takes_away_or_changes_is_named() -> None:
    below = (("/opt", FOLDER), ("/opt/a", FOLDER), ("/opt/a/b", FILE))
    gone, other = replace(FILE, kind="removed"), replace(FILE, size=4)
    above = (("/opt/a", gone), ("/opt/a/b", other))
    found = compare.differences([below], [below, above])
    assert [(one.path, one.rebuilt) for one in found] == [("/opt/a", gone), ("/opt/a/b", other)]


def test_content_comes_first_then_modes_then_times_and_derived_files_later() -> None:
    def changed_file(**fields: Any) -> tuple[Entry, Entry]:
        return FILE, replace(FILE, **fields)

    pairs = {
        "/a/time.py": changed_file(mtime=1),
        "/b/mode.py": changed_file(mode="0755"),
        "/c/RECORD": changed_file(sha256="b" * 64),
        "/d/build.json": changed_file(sha256="b" * 64),
        "/e/x.pyc": changed_file(sha256="b" * 64),
        "/f/x.py": changed_file(sha256="b" * 64),
        "/g": (FOLDER, replace(FOLDER, size=1)),
    }
    one, other = ([[(path, pair[side]) for path, pair in pairs.items()]] for side in (0, 1))
    found = compare.differences(one, other)
    order = ["/f/x.py", "/c/RECORD", "/d/build.json", "/e/x.pyc", "/b/mode.py", "/a/time.py", "/g"]
    assert [difference.path for difference in found] == order
    without = [difference.path for difference in compare.differences(one, other, times=False)]
    assert without == [path for path in order if path != "/a/time.py"]


def test_what_differs_is_shown_with_both_values() -> None:
    lines = compare.Difference("/a", FILE, replace(FILE, mode="0755", mtime=1)).told()
    assert [*lines] == [
        "mode: 0644 in image, 0755 in rebuilt",
        "mtime: none in image, 1 in rebuilt",
    ]
    assert [*compare.Difference("/a", None, FILE).told()] == ["nothing is added there in image"]
    one = {"Env": ["A=1", "B=2"], "Labels": {"x.y": "1"}, "Cmd": None}
    other = {"Env": ["A=1", "B=3", "C=4"], "Labels": {}, "Cmd": []}
    assert compare.values(one, other) == [
        ("Env[1]", "B=2", "B=3"),
        ("Env[2]", "none", "C=4"),
        ("Labels.x.y", "1", "none"),
    ]
