"""Images built again and compared, file by file; known weaknesses; what prune takes."""

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
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import BuildError, EngineError, UsageError
from launcher.base.names import LABEL
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.base.zstd import zstd
from launcher.images.builder import beside
from launcher.images.builder.image import OCI, BuiltImage
from launcher.images.carry import compare, rebuild
from launcher.images.carry.compare import Difference
from launcher.images.matrix.matrix_file import load_matrix
from launcher.images.oci.image_layers import LayerEntries, LayerEntry, read_layer, read_layers
from tests.e2e.site import program

from .conftest import FORMS, Engine, sha256

LABELS = {f"{LABEL}row": "24.10", f"{LABEL}megatron": "0.12.3", f"{LABEL}source": "git"}
EPOCH = 1735689600  # 2025-01-01
BUILDKIT, CLASSIC = "buildkit.dockerfile.v0", ""
BASE = rebuild.RebuildSubject(
    "sha256:b", (), ("b1", "b2"), "", {}, [{"CreatedBy": "x", "Comment": BUILDKIT}], [1]
)


def built(
    by: str = BUILDKIT, created: str = "2025-01-01T00:00:00Z", top: str = "1"
) -> rebuild.RebuildSubject:
    step = {"CreatedBy": "COPY /stage/ /", "Comment": by}
    settings = {"Labels": LABELS}
    layers = (*BASE.layers, f"m{top}")
    return rebuild.RebuildSubject(
        "sha256:i", (), layers, created, settings, [*BASE.history, step], [1, EPOCH]
    )


PATH = {f"{LABEL}source": "path"}


@pytest.mark.parametrize(
    ("change", "departures", "expected"),
    [
        (
            {},
            rebuild.Departures(base="mirror/pytorch:{tag}-py3", builder="b"),
            {"tag": "24.10", "megatron": "0.12.3", "no_cache": True, "architectures": None}
            | {"base": "mirror/pytorch:24.10-py3", "builder": "b"},
        ),
        (
            {f"{LABEL}row": "cuda-12.4", f"{LABEL}architectures": "90a"},
            rebuild.Departures(),
            {"tag": "cuda-12.4", "architectures": "90a"},
        ),
        (PATH, rebuild.Departures(checkout=Path("/m")), {"checkout": Path("/m")}),
        (  # a checkout of another patch release is built by the same rules
            PATH | {f"{LABEL}megatron": "0.12.1", f"{LABEL}rules": "0.12.3"},
            rebuild.Departures(checkout=Path("/m")),
            {"megatron": "0.12.3"},
        ),
    ],
)
def test_what_is_built_again_is_what_the_labels_say(
    change: dict[str, str], departures: rebuild.Departures, expected: dict[str, Any]
) -> None:
    found = rebuild.request("x", LABELS | change, departures, load_matrix())
    assert {key: getattr(found, key) for key in expected} == expected


MADE = LABELS | {f"{OCI}base.name": "standin:1", f"{LABEL}builder": "standin:2"}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({f"{LABEL}row": ""}, BuildError, r"has no label megatron-launchpad\.row"),
        ({f"{LABEL}row": "99.99"}, BuildError, "row '99.99', which the matrix doesn't have"),
        (PATH, UsageError, "--source PATH"),
    ],
)
def test_what_cannot_be_rebuilt_is_refused(
    change: dict[str, str], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        rebuild.request("x", MADE | change, rebuild.Departures(), load_matrix())


def test_base_and_builder_that_the_image_names_are_both_told() -> None:
    """One of them was."""
    wanted = rebuild.request("x", MADE, rebuild.Departures(), load_matrix())
    assert rebuild.unnamed(MADE, wanted, "row:1") == {"base": "standin:1", "builder": "standin:2"}
    assert rebuild.unnamed(MADE, replace(wanted, base="b"), "row:1") == {"builder": "standin:2"}
    assert (
        rebuild.unnamed(MADE | {f"{OCI}base.name": "row:1", f"{LABEL}builder": ""}, wanted, "row:1")
        == {}
    )


@pytest.mark.parametrize(
    ("there", "taken"),
    [
        ({"standin:1": True, "standin:2": True}, ("standin:1", "standin:2")),
        ({"standin:1": True, "standin:2": False}, ("standin:1", None)),
        ({}, (None, None)),
    ],
)
def test_stand_ins_that_are_here_need_no_option(
    empty_site: Settings, there: dict[str, bool], taken: tuple[str | None, str | None]
) -> None:
    """After a demo without a registry, `make verify TAG=cpu` wanted both of them named."""
    engine: Any = Engine()
    for name, stands_in in there.items():
        engine.add(name, (name.encode(),), **({f"{LABEL}standin": "d"} if stands_in else {}))
    verification = rebuild.Verification(engine, empty_site, Progress(io.StringIO()))
    image = replace(built(), settings={"Labels": MADE})
    found = verification._standins(image, rebuild.Departures())
    assert (found.get("base"), found.get("builder")) == taken
    assert verification._standins(image, rebuild.Departures(base="a", builder="b")) == {}


def test_another_base_and_other_inputs_are_noted_with_what_the_labels_say() -> None:
    image = replace(built(), settings={"Labels": {**LABELS, f"{LABEL}version": "0.1"}})
    now = {f"{OCI}base.name": "base:1", f"{LABEL}version": "0.2"}
    base = replace(BASE, layers=("b1", "other", "b3"))
    first, second, *rest = rebuild.notes(image, base, now, "k")
    assert first == "it lies on another base than base:1 sha256:b: it has 1 of that one's 3 layers"
    assert "other inputs" in second
    assert rest == [f"{LABEL}version: 0.1, now 0.2", f"{OCI}base.name: none, now base:1"]
    same = replace(built(), settings={"Labels": {**LABELS, f"{LABEL}key": "k"}})
    assert list(rebuild.notes(same, BASE, {f"{OCI}base.name": "base:1"}, "k")) == []


LATE = "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("image", "rebuilt", "layers", "whole"),
    [
        (built(), built(), True, True),
        (built(created=LATE), built(), True, True),  # it was changed, or made by something else
        (built(), built(created=LATE), True, False),
        (built(CLASSIC), built(), False, False),
        (built(CLASSIC, LATE), built(CLASSIC, LATE), False, False),
        (built(CLASSIC, LATE), built(CLASSIC), False, False),
        (built(CLASSIC), built(CLASSIC), True, True),  # Podman with its --timestamp
    ],
)
def test_claims_are_what_the_builders_allow(
    image: rebuild.RebuildSubject, rebuilt: rebuild.RebuildSubject, layers: bool, whole: bool
) -> None:
    found = rebuild.claims(image, rebuilt, BASE, EPOCH)
    assert (found.layers, found.image) == (layers, whole)
    assert bool(found.because) == (not whole)


def test_on_another_base_as_many_layers_are_compared_as_are_added() -> None:
    image = replace(built(), layers=("o1", "o2", "o3", "m1"))
    pair = rebuild.Comparison(
        image, built(), BASE, rebuild.RebuildClaims(), (None, None), None, print
    )  # type: ignore[arg-type]
    assert pair._added() == (("m1",), ("m1",))
    changed = replace(pair, image=replace(image, layers=(*BASE.layers, "m1", "extra")))
    assert changed._added() == (("m1", "extra"), ("m1",))


@pytest.mark.parametrize(
    ("seconds", "within", "said"),
    [
        (0, 5, "  a and b differ"),
        (9, 1, "diffoscope takes more than 1 s: --diffoscope waits for it"),
        (1, None, "  a and b differ"),
    ],
)
def test_diffoscope_is_used_where_it_is_installed_and_takes_long_only_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, within: int | None, said: str
) -> None:
    text = f"#!/bin/sh\nsleep {seconds}\necho a and b differ\nexit 1\n"
    program(tmp_path / "diffoscope", text)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(rebuild, "copy_out", lambda *_: False)
    lines: list[str] = []
    out = Progress(io.StringIO())
    pair = rebuild.Comparison(
        built(), built(), BASE, rebuild.RebuildClaims(), (None, None), out, lines.append
    )  # type: ignore[arg-type]
    pair._look_inside([Difference("/a", None, None)], within)
    assert lines == [said]


def test_what_is_built_again_goes_with_its_documents_unless_it_was_there(
    empty_site: Settings,
) -> None:
    engine: Any = Engine()
    new, there = engine.add("verify-1:cpu", (b"new",)), engine.add("verify-1:old", (b"there",))
    there.names.append("megatron:cpu")
    verification = rebuild.Verification(engine, empty_site, Progress(io.StringIO()))
    for held in (new, there):
        beside.put({beside.SBOM: b""}, held.id, empty_site)
        verification._remove(BuiltImage(held.names[:1], held.id, reused=False))
    assert (new.names, there.names) == ([], ["megatron:cpu"])
    assert not beside.texts(new.id, empty_site)
    assert beside.texts(there.id, empty_site)


def test_without_diffoscope_nothing_is_built_for_it(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    verification = rebuild.Verification(None, empty_site, Progress(io.StringIO()))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no diffoscope"):
        verification.verify("x", rebuild.Departures(), diffoscope=True)


FILE = LayerEntry("file", "0644", "0:0", 3, 0, sha256="a" * 64)
FOLDER = LayerEntry("folder", "0755", "0:0", 0, 0)


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


def layer(*members: tuple[tarfile.TarInfo, bytes]) -> LayerEntries:
    return read_layer(io.BufferedReader(io.BytesIO(tarred(*members))))[1]


# What engines save

NO_TAR = b"\xff" * 2048  # would fail where it was read


def saving(form: str, contents: list[bytes], packed: Callable[[bytes], bytes] = bytes) -> Engine:
    """An engine with an image of these layers, which it gives packed."""
    engine = Engine(form)
    engine.add("image:1", contents)
    engine.layers = {diff_id: packed(content) for diff_id, content in engine.layers.items()}
    return engine


def layers_of(engine: Engine, known: int = 0) -> dict[str, LayerEntries]:
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
    assert found["/bin/ping"] == LayerEntry(
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
    for one, two in ((members, other), (other, members)):
        found = compare.differences([layer(*one)], [layer(*two)])
        assert [difference.path for difference in found] == [f"/{members[place][0].name}"]
    assert not compare.differences([layer(*members)], [layer(*members)])


def test_what_a_layer_takes_away_or_changes_is_named() -> None:
    below = (("/opt", FOLDER), ("/opt/a", FOLDER), ("/opt/a/b", FILE))
    gone, other = replace(FILE, kind="removed"), replace(FILE, size=4)
    above = (("/opt/a", gone), ("/opt/a/b", other))
    found = compare.differences([below], [below, above])
    assert [(one.path, one.rebuilt) for one in found] == [("/opt/a", gone), ("/opt/a/b", other)]


def test_content_comes_first_then_modes_then_times_and_derived_files_later() -> None:
    def changed_file(**fields: Any) -> tuple[LayerEntry, LayerEntry]:
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
