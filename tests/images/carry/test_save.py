"""Saving: the same layout from every engine's format, and whatever stopped an earlier attempt."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.base import files, owned
from launcher.base.errors import EngineError, UsageError
from launcher.base.screen import Progress
from launcher.base.zstd import zstd
from launcher.images.carry import image_lookup
from launcher.images.carry.image_lookup import EngineImage
from launcher.images.carry.save import BEGUN, BLOB, INCOMING, save
from launcher.images.oci import oci_layout
from launcher.images.oci.oci_layout import Listing
from launcher.images.oci.saved import chain_ids
from tests.tables import table

from .conftest import BASE_LAYERS, FORMS, OWN_LAYERS, Engine, filled, sha256

DOCUMENTS = {"provenance.json": b"{}\n", "sbom.cdx.json": b'{"components": []}\n'}
QUIET = Progress(open("/dev/null", "w"))  # noqa: SIM115


def saved(engine: Engine, folder: Path, thin: bool = False) -> Listing:
    image = image_lookup.find(engine, "megatron:24.10")
    base = image_lookup.base_of(engine, image, {}) if thin else None
    return save(engine, image, folder, QUIET, base, DOCUMENTS)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file under a folder but for our marker."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != owned.MARKER
    }


@cache
def whole(form: str = "legacy", thin: bool = False) -> dict[str, bytes]:
    """The files of a save that nothing has stopped."""
    with tempfile.TemporaryDirectory() as folder:
        saved(filled(form), Path(folder), thin)
        return contents(Path(folder))


def pieces(folder: Path) -> dict[Path, os.stat_result]:
    """The files of layers, each with what is another where it was written again."""
    return {path: path.stat() for path in folder.glob("blobs/sha256/*")}


def kept(before: dict[Path, os.stat_result], folder: Path) -> int:
    """The bytes of those that are the same ones still."""
    now = {(path, one.st_ino, one.st_mtime_ns) for path, one in pieces(folder).items()}
    return sum(
        one.st_size for path, one in before.items() if (path, one.st_ino, one.st_mtime_ns) in now
    )


@pytest.mark.parametrize("thin", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_an_oci_layout(tmp_path: Path, form: str, thin: bool) -> None:
    listing = saved(filled(form), tmp_path, thin)
    held = contents(tmp_path)
    assert set(held) == {*(file.path for file in listing.files), oci_layout.LISTING, "SHA256SUMS"}
    assert held[oci_layout.LISTING] == oci_layout.render(listing)
    sums = "".join(
        f"{sha256(held[name])[7:]}  {name}\n" for name in sorted(held) if name != oci_layout.SUMS
    )
    assert held[oci_layout.SUMS].decode() == sums  # as `sha256sum --check` reads them
    assert json.loads(held["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    (first, second) = json.loads(held["index.json"])["manifests"]
    assert first["digest"] == second["digest"] == listing.manifest
    assert [one["annotations"] for one in (first, second)] == [
        {
            "org.opencontainers.image.ref.name": tag,
            "io.containerd.image.name": f"megatron:{tag}",
        }
        for tag in ("24.10", "24.10-0.9.0")
    ]
    manifest = json.loads(held[oci_layout.blob_path(listing.manifest)])
    assert len(held[oci_layout.blob_path(listing.manifest)]) == first["size"]
    image = filled(form).find("megatron:24.10")
    assert listing.image == manifest["config"]["digest"] == image.id
    for number, (one, diff_id) in enumerate(zip(manifest["layers"], image.diff_ids, strict=True)):
        there = held.get(oci_layout.blob_path(one["digest"]))
        if thin and number in (0, 2):
            assert listing.base is not None
            assert listing.base.layers == tuple(map(sha256, BASE_LAYERS))
            assert there is None
            if form != "packed":
                assert (one["mediaType"], one["digest"]) == (oci_layout.LAYER_TYPE, diff_id)
            continue
        assert there is not None
        assert (len(there), sha256(there)) == (one["size"], one["digest"])
        if form == "packed":
            assert one["mediaType"] == f"{oci_layout.LAYER_TYPE}+gzip"
            assert sha256(gzip.decompress(there)) == diff_id
            assert "annotations" not in one
        else:
            assert one["mediaType"] == f"{oci_layout.LAYER_TYPE}+zstd"
            assert sha256(zstd.decompress(there)) == diff_id
            assert one["annotations"] == {oci_layout.UNPACKED: diff_id}
    if form != "packed":  # every format gives the same files
        assert whole("legacy", thin) == held


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 100_000), st.sampled_from(FORMS), st.booleans())
def test_a_save_that_is_cut_off_is_not_taken_for_a_whole_one_and_the_next_completes_it(
    tmp_path_factory: pytest.TempPathFactory, ends: int, form: str, thin: bool
) -> None:
    folder, engine = tmp_path_factory.mktemp("cut"), filled(form)
    engine.ends = ends
    try:
        saved(engine, folder, thin)
    except EngineError as error:
        assert "ended its stream early" in error.problem
        assert not (folder / oci_layout.LISTING).exists()
    engine.ends = None
    saved(engine, folder, thin)
    assert contents(folder) == whole(form, thin)


def test_layers_are_found_again_whenever_a_save_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any of the renames: of a layer's files to their place, and of what tells of it."""
    engine = filled()
    replace, step, least = os.replace, 0, 0

    def killing(*paths: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        replace(*paths)

    folder = tmp_path / "cut"
    while True:
        left = step = step + 1
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", killing)
            try:
                saved(engine, folder)
            except KeyboardInterrupt:
                assert not (folder / oci_layout.LISTING).exists()
            else:
                break
        begun = folder / INCOMING / BEGUN
        told = json.loads(begun.read_text()) if begun.exists() else {}
        known = sum(blob["size"] for blob in told.get("blobs", {}).values())
        assert known >= least
        least = known
    assert step > 5
    assert contents(folder) == whole()
    assert least > 0.9 * sum(map(len, whole().values()))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"layers": 1}', '{"layers": [1]}'])
@pytest.mark.parametrize("damaged", ["manifest", oci_layout.LISTING, "both"])
def test_where_what_tells_of_layers_is_damaged_they_are_written_again(
    tmp_path: Path, text: str, damaged: str
) -> None:
    listing = saved(filled(), tmp_path)
    if damaged != oci_layout.LISTING:
        (tmp_path / oci_layout.blob_path(listing.manifest)).write_text(text)
    if damaged != "manifest":
        (tmp_path / oci_layout.LISTING).write_text(text)
    saved(filled(), tmp_path)
    assert contents(tmp_path) == whole()


@pytest.mark.parametrize("form", FORMS)
def test_a_configuration_may_begin_with_a_blank(tmp_path: Path, form: str) -> None:
    engine = filled(form)
    held = engine.images.pop(engine.find("megatron:24.10").id)
    held.config = b"\n " + held.config
    engine.images[held.id] = held
    listing = saved(engine, tmp_path)
    assert (tmp_path / oci_layout.blob_path(listing.image)).read_bytes() == held.config


def begin(engine: Engine, image: EngineImage, folder: Path, complete: bool = False) -> None:
    """A save, of some layers alone where it isn't `complete`."""
    engine.ends = None if complete else 120_000
    with nullcontext() if complete else pytest.raises(EngineError):
        save(engine, image, folder, QUIET)
    engine.ends = None
    assert (folder / oci_layout.LISTING).exists() == complete


@pytest.mark.parametrize("left", [None, b"", b'["megatron:24', b'{"blobs": {"x": 1}}', "whole"])
def test_a_save_that_was_cut_off_is_gone_on_with(tmp_path: Path, left: bytes | str | None) -> None:
    """What it has written is kept where it tells of that."""
    engine = filled()
    begin(engine, image_lookup.find(engine, "megatron:24.10"), tmp_path / "cut")
    begun = tmp_path / "cut" / INCOMING / BEGUN
    if isinstance(left, bytes):
        begun.write_bytes(left)
    elif left is None:
        begun.unlink()
    before = pieces(tmp_path / "cut")
    saved(engine, tmp_path / "cut")
    assert (kept(before, tmp_path / "cut") > 40_000) == (left == "whole")
    assert contents(tmp_path / "cut") == whole()


@pytest.mark.parametrize("inner", ["blobs", "blobs/sha256", "documents", INCOMING])
def test_what_a_link_among_the_folders_leads_to_stays(tmp_path: Path, inner: str) -> None:
    """A stick's list of our shape, and a link: files that the list didn't name were removed."""
    stick, home = tmp_path / "stick", tmp_path / "home"
    home.mkdir()
    (home / "thesis").write_text("x")
    saved(filled(), stick)
    folder = stick / inner
    if folder.exists():
        folder.rename(home / "moved")
    folder.parent.mkdir(exist_ok=True)
    folder.symlink_to(home)
    before = contents(home)
    with pytest.raises((files.ForeignFileError, UsageError)):
        saved(filled(), stick)
    assert contents(home) == before


@pytest.mark.parametrize("link", ["symbolic", "hard"])
def test_a_piece_that_is_a_link_isnt_written_through(tmp_path: Path, link: str) -> None:
    stick, thesis = tmp_path / "stick", tmp_path / "thesis"
    thesis.write_text("x")
    begin(filled(), image_lookup.find(filled(), "megatron:24.10"), stick)
    path = stick / INCOMING / BLOB
    path.unlink(missing_ok=True)
    (path.symlink_to if link == "symbolic" else path.hardlink_to)(thesis)
    with pytest.raises(files.ForeignFileError):
        saved(filled(), stick)
    assert thesis.read_text() == "x"


def test_a_folder_of_our_shape_that_no_save_made_is_refused(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs" / INCOMING / "thesis.doc"
    theirs.parent.mkdir(parents=True)
    theirs.write_bytes(b"")
    with pytest.raises(UsageError, match="it has incoming in it"):
        saved(filled(), tmp_path / "theirs")
    assert theirs.exists()
    tmp_path /= "ours"
    saved(filled(), tmp_path)
    (tmp_path / owned.MARKER).unlink()
    with pytest.raises(UsageError, match="no launcher has made it"):
        saved(filled(), tmp_path)
    assert (tmp_path / oci_layout.LISTING).exists()


@pytest.mark.parametrize("complete", [False, True])
def test_an_image_is_the_same_under_other_names(tmp_path: Path, complete: bool) -> None:
    """Another of its names, one that it got since, and none but its ID."""
    engine = filled()
    first = image_lookup.find(engine, "megatron:24.10-0.9.0")
    begin(engine, first, tmp_path, complete)
    engine.find("megatron:24.10").names += ["megatron:newest", "other:1"]
    for name in ("megatron:24.10", "other:1", first.id):
        image = image_lookup.find(engine, name)
        assert save(engine, image, tmp_path, QUIET).names == image.names


def test_an_image_that_was_built_again_takes_the_place_of_its_name(tmp_path: Path) -> None:
    for name in ("System Volume Information", ".Trashes"):  # of a stick, a system's own
        (tmp_path / name).mkdir()
    engine = filled()
    saved(engine, tmp_path)
    engine.find("megatron:24.10").names.clear()
    again = engine.add("megatron:24.10", (*BASE_LAYERS, *OWN_LAYERS[:-1], b"again"))
    before = pieces(tmp_path)
    assert saved(engine, tmp_path).image == again.id
    assert kept(before, tmp_path) > 43_000  # what is in the files of the base's layers


@pytest.mark.parametrize("complete", [False, True])
def test_images_without_names_are_told_apart(tmp_path: Path, complete: bool) -> None:
    engine = filled()
    other = engine.add("other:1", (*BASE_LAYERS, b"other"))
    first, second = (
        image_lookup.find(engine, one.id) for one in (engine.find("megatron:24.10"), other)
    )
    begin(engine, first, tmp_path, complete)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=f"holds another image: {first.id}"):
        save(engine, second, tmp_path, QUIET)
    assert contents(tmp_path) == before


def test_a_layer_that_is_another_is_refused(tmp_path: Path) -> None:
    engine = filled()
    engine.layers[sha256(OWN_LAYERS[0])] = OWN_LAYERS[1]
    with pytest.raises(EngineError, match="store is damaged") as caught:
        saved(engine, tmp_path)
    with pytest.raises(EngineError, match="store is damaged"):
        saved(engine, tmp_path)
    assert sha256(OWN_LAYERS[0]) in str(caught.value)
    assert not (tmp_path / oci_layout.LISTING).exists()


def test_no_image_and_no_base_are_told(tmp_path: Path) -> None:
    engine = Engine()
    with pytest.raises(EngineError, match=r"no image megatron:24\.10") as caught:
        image_lookup.find(engine, "megatron:24.10")
    assert caught.value.remedy == "make image TAG=24.10"
    engine.add("megatron:24.10", (*BASE_LAYERS, *OWN_LAYERS))
    with pytest.raises(EngineError, match="doesn't have the image that it was built on"):
        saved(engine, tmp_path, thin=True)


def test_a_base_that_is_chosen_shares_what_it_shares() -> None:
    engine = filled()
    engine.add("megatron:24.09", (*BASE_LAYERS, OWN_LAYERS[0], b"other"))
    engine.add("far:1", (b"far",))
    image = image_lookup.find(engine, "megatron:24.10")
    base = image_lookup.base_of(engine, image, {}, "megatron:24.09")
    assert base.layers == tuple(map(sha256, (*BASE_LAYERS, OWN_LAYERS[0])))
    with pytest.raises(EngineError, match="has no layer of it"):
        image_lookup.base_of(engine, image, {}, "far:1")
    with pytest.raises(EngineError, match="is the same image"):
        image_lookup.base_of(engine, image, {}, "megatron:24.10-0.9.0")


def test_packages_of_the_row_count_as_the_bases() -> None:
    """Not the base's layers alone: torch is among the packages, and much larger."""
    engine = filled()
    rows = {"cpu": SimpleNamespace(packages=["torch"], base="base:1")}
    labels = {image_lookup.BASE_NAME: "base:1", f"{image_lookup.LABEL}row": "cpu"}
    ours = engine.add("megatron:cpu", (*BASE_LAYERS, *OWN_LAYERS), **labels)
    image = image_lookup.find(engine, ours.names[0])
    engine.histories[image.id] = ["COPY /stage/ / # buildkit"]
    base = image_lookup.base_of(engine, image, rows)
    assert (base.id, base.layers) == (image.id, image.layers[:-1])
    engine.histories[image.id].insert(0, "RUN pip install more")  # somebody's, made from ours
    assert image_lookup.base_of(engine, image, rows).name == "base:1"


def test_the_base_is_found_by_its_name_before_its_layers() -> None:
    engine = filled()
    engine.add("whole:1", (*BASE_LAYERS, OWN_LAYERS[0]))
    image = image_lookup.find(engine, "megatron:24.10")
    assert image_lookup.base_of(engine, image, {}).name == "whole:1"
    labelled = engine.add(
        "ours:1", (*BASE_LAYERS, *OWN_LAYERS), **{image_lookup.BASE_NAME: "base:1"}
    )
    assert (
        image_lookup.base_of(engine, image_lookup.find(engine, labelled.names[0]), {}).name
        == "base:1"
    )


@table("text", "name")
def test_an_image_is_named_by_row_or_name(text: str, name: str) -> None:
    assert image_lookup.reference(text, {"24.10": None, "cuda-12.4": None}) == name


@table("told", "asked")
def test_an_image_has_its_names_however_engine_and_user_write_docker_hub_s(
    told: str, asked: str
) -> None:
    engine = Engine()
    engine.add(told.format(1), BASE_LAYERS).names.append(told.format(2))
    found = image_lookup.find(engine, asked.format(2))
    assert found.names == (asked.format(2), asked.format(1))


def test_chain_ids_are_those_of_the_image_specification() -> None:
    """Of an image of docker 20.10's own making: base, packages and ours."""
    one, two = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
    assert chain_ids([one, two]) == [one, sha256(f"{one} {two}".encode())]
