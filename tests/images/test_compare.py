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
from launcher.oci.layers import Entry, Layer, layers, read
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


def test_fields_that_differ_are_shown_with_both_values() -> None:
    lines = list(compare.described(FILE, replace(FILE, mode=0o755, mtime=1)))
    assert "mode       image    0644" in lines
    assert "           rebuilt  0755" in lines
    assert "size       3" in lines
    assert next(compare.described(None, FILE)) == "nothing is added there in image"


def test_settings_that_differ_are_named_by_their_keys() -> None:
    one = {"Env": ["A=1", "B=2"], "Labels": {"x.y": "1"}, "Cmd": None}
    other = {"Env": ["A=1", "B=3", "C=4"], "Labels": {}, "Cmd": []}
    assert compare.values(one, other) == [
        ("Env[1]", "B=2", "B=3"),
        ("Env[2]", "none", "C=4"),
        ("Labels.x.y", "1", "none"),
    ]
