"""Layers read from what engines save, and any file that was changed in them found and named."""

from __future__ import annotations

import bz2
import copy
import gzip
import hashlib
import io
import json
import lzma
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import EngineError
from launcher.images import compare
from launcher.images.compare import Place
from launcher.oci.layers import Entry, Layer, layers, read, unpack
from launcher.oci.saved import chain_ids, legacy_id
from launcher.zstd import zstd

FILE = Entry("file", 0o644, "0:0", 3, 0, sha256="a" * 64)
FOLDER = Entry("folder", 0o755, "0:0", 0, 0)


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


def sha256(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def layer(*members: tuple[tarfile.TarInfo, bytes]) -> Layer:
    return read(io.BufferedReader(io.BytesIO(tarred(*members))))[1]


def chunks(content: bytes, size: int = 1000) -> Iterator[bytes]:
    return (content[at : at + size] for at in range(0, len(content), size))


# What engines save


def as_before_25(contents: list[bytes], diff_ids: list[str]) -> bytes:
    """Docker up to 24: ID/json and ID/layer.tar for each layer, in the order of the IDs."""
    ids: list[str] = []
    records: dict[str, tuple[bytes, bytes]] = {}
    for content, chain in zip(contents, chain_ids(diff_ids), strict=True):
        record: dict[str, Any] = {"created": "1970-01-01T00:00:00Z", "container_config": {}}
        if ids:
            record["parent"] = ids[-1]
        ids.append(legacy_id(record, chain))
        text = json.dumps({"id": ids[-1], **record, "os": "linux"}).encode()
        records[ids[-1]] = text, content
    names = [f"{one}/layer.tar" for one in ids]
    manifest = json.dumps([{"Config": f"{'0' * 64}.json", "Layers": names}]).encode()
    members = [(member(f"{'0' * 64}.json"), b"{}")]
    for one in sorted(records):
        members += [
            (member(one, type=tarfile.DIRTYPE), b""),
            (member(f"{one}/VERSION"), b"1.0"),
            (member(f"{one}/json"), records[one][0]),
            (member(f"{one}/layer.tar"), records[one][1]),
        ]
    return tarred(*members, (member("manifest.json"), manifest), pax=False)


def as_oci(contents: list[bytes], diff_ids: list[str]) -> bytes:
    """Docker from 25 on: blobs by their digest, in the order of those."""
    named = dict(sorted((sha256(one).partition(":")[2], one) for one in [*contents, b'{"a":1}']))
    manifest = json.dumps(
        [
            {
                "Config": f"blobs/sha256/{sha256(b'{').partition(':')[2]}",
                "Layers": [f"blobs/sha256/{sha256(one).partition(':')[2]}" for one in contents],
            }
        ]
    ).encode()
    blobs = [(member(f"blobs/sha256/{name}"), content) for name, content in named.items()]
    return tarred(*blobs, (member("manifest.json"), manifest))


FORMATS = {"before 25": as_before_25, "oci": as_oci}
NO_TAR = b"\xff" * 2048  # would fail where it was read


@pytest.mark.parametrize("form", FORMATS)
def test_layers_of_both_formats_are_read_and_those_below_are_passed_over(form: str) -> None:
    added = [tarred((member("opt/a"), b"a")), tarred((member("opt/b"), b"b"))]
    contents = [NO_TAR, *added]
    diff_ids = [sha256(one) for one in contents]
    stream = FORMATS[form](contents, diff_ids)
    found = layers(chunks(stream), diff_ids, diff_ids[:1])
    assert [found[one][0][0] for one in diff_ids[1:]] == ["/opt/a", "/opt/b"]
    assert list(layers(chunks(stream), diff_ids, diff_ids[:2])) == diff_ids[2:]


PACKINGS = {
    "gzip": gzip.compress,
    "zstd": zstd.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_layers_are_known_by_what_is_in_them(packing: str) -> None:
    plain = tarred((member("opt/a"), b"a"))
    packed = PACKINGS[packing](plain)
    found = layers(chunks(as_oci([packed], [sha256(plain)])), [sha256(plain)], [])
    assert list(found) == [sha256(plain)]
    assert [path for path, _ in found[sha256(plain)]] == ["/opt/a"]


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_layer_that_is_damaged_is_told(packing: str) -> None:
    packed = PACKINGS[packing](tarred((member("opt/a"), bytes(range(256)) * 20)))
    stream = as_oci([packed[:-9]], [sha256(b"")])
    with pytest.raises(EngineError, match="can't be read"):
        layers(chunks(stream), [sha256(b"")], [])


def test_a_layer_packed_as_python_cannot_read_it_is_left_out() -> None:
    plain = tarred((member("opt/a"), b"a"))
    lz4 = b"\x04\x22\x4d\x18" + NO_TAR
    stream = as_oci([lz4, plain], [sha256(b""), sha256(plain)])
    assert list(layers(chunks(stream), [sha256(b""), sha256(plain)], [])) == [sha256(plain)]


def test_a_stream_that_ends_early_is_told() -> None:
    content = tarred((member("opt/a"), b"a" * 5000))
    stream = as_oci([content], [sha256(content)])
    with pytest.raises(EngineError, match="can't be read"):
        layers(chunks(stream[:3000]), [sha256(content)], [])


def test_an_entry_holds_all_that_its_header_says() -> None:
    special = member("./dev/x", type=tarfile.CHRTYPE, devmajor=1, devminor=3)
    capable = member("bin/ping", mode=0o4755, uid=1, gid=2, mtime=7, uname="u", gname="g")
    capable.pax_headers = {"SCHILY.xattr.security.capability": "x", "comment": "c"}
    link = member("lib", type=tarfile.SYMTYPE, linkname="usr/lib")
    found = dict(layer((special, b""), (capable, b"abc"), (link, b""), (member("a/.wh.b"), b"")))
    assert found["/dev/x"].target == "1:3"
    assert found["/bin/ping"] == Entry(
        "file",
        0o4755,
        "1:2",
        3,
        7,
        sha256=hashlib.sha256(b"abc").hexdigest(),
        attributes=(("security.capability", "x"),),
        header=(("comment", "c"), ("group", "g"), ("user", "u")),
    )
    assert (found["/lib"].kind, found["/lib"].target) == ("symbolic link", "usr/lib")
    assert found["/a/b"].kind == "removed"


def test_what_an_engine_archives_of_a_path_is_unpacked(tmp_path: Any) -> None:
    entry = unpack(chunks(tarred((member("x.py"), b"abc"))), tmp_path / "x")
    assert (entry.kind, entry.size, (tmp_path / "x").read_bytes()) == ("file", 3, b"abc")
    assert unpack(chunks(tarred(folder("x"))), tmp_path / "y").kind == "folder"
    assert not (tmp_path / "y").exists()


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
    one, another = compare.merge([layer(*members)]), compare.merge([layer(*other)])
    # A path below one that is no folder is hidden by it, in an engine as here.
    path = f"/{members[place][0].name}"
    found = [difference.path for difference in compare.differences(one, another)]
    if path in one:
        assert path in found
    assert all(name == path or name.startswith(f"{path}/") for name in found)
    assert not compare.differences(one, one)


@given(st.data(), trees(), CONTENTS)
def test_a_change_in_a_layer_on_top_is_named(
    data: st.DataObject, members: list[tuple[tarfile.TarInfo, bytes]], content: bytes
) -> None:
    """As `docker commit` leaves it: the same layers, and one more with the changed file."""
    one, before = data.draw(st.sampled_from(members))
    below = layer(*members)
    top = layer((member(one.name), content + b"x"))
    added = compare.merge([below]), compare.merge([below, top])
    found = {difference.path for difference in compare.differences(*added)}
    same = (
        one.isreg()
        and before == content + b"x"
        and compare.merge([top]).items() <= (added[0].items())
    )
    assert same or f"/{one.name}" in found


def test_what_a_layer_takes_away_is_named_and_hides_what_is_below() -> None:
    below = (("/opt", FOLDER), ("/opt/a", FOLDER), ("/opt/a/b", FILE))
    gone = replace(FILE, kind="removed")
    assert compare.merge([below, (("/opt/a", gone),)]) == {"/opt": FOLDER, "/opt/a": gone}
    emptied = compare.merge([below, (("/opt/a/.wh..wh..opq", FILE), ("/opt/a/c", FILE))])
    assert "/opt/a/b" not in emptied
    assert "/opt/a/c" in emptied
    found = compare.differences(compare.merge([below]), emptied)
    assert {one.path for one in found} >= {"/opt/a/b", "/opt/a/c"}


def test_content_comes_first_then_modes_then_times_and_derived_files_later() -> None:
    def changed_file(**fields: Any) -> tuple[Entry, Entry]:
        return FILE, replace(FILE, **fields)

    pairs = {
        "/a/time.py": changed_file(mtime=1),
        "/b/mode.py": changed_file(mode=0o755),
        "/c/RECORD": changed_file(sha256="b" * 64),
        "/d/build.json": changed_file(sha256="b" * 64),
        "/e/x.pyc": changed_file(sha256="b" * 64),
        "/f/x.py": changed_file(sha256="b" * 64),
        "/g": (FOLDER, replace(FOLDER, size=1)),
    }
    one, other = ({path: pair[side] for path, pair in pairs.items()} for side in (0, 1))
    found = compare.differences(one, other)
    order = ["/f/x.py", "/c/RECORD", "/d/build.json", "/e/x.pyc", "/b/mode.py", "/a/time.py", "/g"]
    assert [difference.path for difference in found] == order
    without = [difference.path for difference in compare.differences(one, other, times=False)]
    assert without == [path for path in order if path != "/a/time.py"]


def test_layers_with_the_same_files_say_how_they_differ() -> None:
    one, other = (("/a", FILE), ("/b", FILE)), (("/b", FILE), ("/a", FILE))
    assert compare.unlike([one], [other]) == (
        "layer 1 has them in another order, from entry 1 on: /a and /b"
    )
    assert "in 2 layers, and in 1" in compare.unlike([one[:1], one[1:]], [one])
    assert "what no entry shows" in compare.unlike([one], [one])


# Within a file


@given(st.binary(max_size=50), st.binary(max_size=50), st.integers(1, 9))
def test_the_first_byte_that_differs_is_found(one: bytes, other: bytes, size: int) -> None:
    before = compare.BLOCK
    compare.BLOCK = size
    try:
        place = compare.parting(io.BytesIO(one), io.BytesIO(other))
    finally:
        compare.BLOCK = before
    if one == other:
        assert place is None
        return
    assert place is not None
    assert one[: place.offset] == other[: place.offset]
    there = [some[place.offset] if place.offset < len(some) else None for some in (one, other)]
    assert [place.image, place.rebuilt] == there
    assert there[0] != there[1]
    if place.line is not None:
        assert place.line == one[: place.offset].count(b"\n") + 1


def test_of_text_the_line_is_shown_with_what_a_terminal_would_obey_written_out() -> None:
    one, other = b"a = 1\nb = 2\nc = 3\n", b"a = 1\nb = \x1b[2J\nc = 3\n"
    place = compare.parting(io.BytesIO(one), io.BytesIO(other))
    assert place == Place(10, ord("2"), 0x1B, 2, ("b = 2", "b = \\x1b[2J"))
    assert list(compare.parted(place)) == [
        "byte       10: image 0x32, rebuilt 0x1b",
        "line       2",
        "           image    b = 2",
        "           rebuilt  b = \\x1b[2J",
    ]


def test_a_bit_flipped_in_a_long_line_of_text_is_in_the_window() -> None:
    text = ("x" * 500 + "needle" + "y" * 500).encode()
    flipped = bytearray(text)
    flipped[503] ^= 0x80
    place = compare.parting(io.BytesIO(text), io.BytesIO(bytes(flipped)))
    assert place is not None
    assert "needle" in place.lines[0]
    assert "nee\\xe4le" in place.lines[1]


def test_binary_files_have_no_line() -> None:
    place = compare.parting(io.BytesIO(b"\x7fELF\0\1"), io.BytesIO(b"\x7fELF\0\2"))
    assert place == Place(5, 1, 2)


def test_a_file_that_ends_where_the_other_goes_on_says_so() -> None:
    place = compare.parting(io.BytesIO(b"ab"), io.BytesIO(b"abc"))
    assert next(compare.parted(place)) == (
        "byte       2: image none, rebuilt 0x63 (none: the file ends there)"
    )


def test_fields_that_differ_are_shown_with_both_values() -> None:
    lines = list(compare.described(FILE, replace(FILE, mode=0o755, mtime=1)))
    assert "mode       image    0644" in lines
    assert "           rebuilt  0755" in lines
    assert "size       3" in lines
    assert next(compare.described(None, FILE)) == "nothing there in image"


def test_settings_that_differ_are_named_by_their_keys() -> None:
    one = {"Env": ["A=1", "B=2"], "Labels": {"x.y": "1"}, "Cmd": None}
    other = {"Env": ["A=1", "B=3", "C=4"], "Labels": {}, "Cmd": []}
    assert compare.values(one, other) == [
        ("Env[1]", "B=2", "B=3"),
        ("Env[2]", "none", "C=4"),
        ("Labels.x.y", "1", "none"),
    ]
