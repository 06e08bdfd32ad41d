"""Loading: checked before anything is given to the engine, whole or thin, named at the end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests.exceptions import ChunkedEncodingError
from requests.exceptions import ConnectionError as RequestsConnectionError
from urllib3.exceptions import ProtocolError

from launcher.base.errors import EngineError, UsageError
from launcher.base.settings import Settings
from launcher.images.builder import beside
from launcher.images.carry import image_lookup
from launcher.images.carry.check import DamagedError, check_saved
from launcher.images.carry.load import LoadedImage, load, put_beside
from launcher.images.carry.remote import OtherImageError
from launcher.images.carry.save import save
from launcher.images.oci import oci_layout
from launcher.images.oci.oci_layout import BaseImage, Listing
from tests.images.builder.made import IMAGE, WHEEL, made

from .conftest import BASE_LAYERS, FORMS, OWN_LAYERS, Engine, filled
from .test_save import DOCUMENTS, QUIET, contents, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole image."""
    path = tmp_path_factory.mktemp("whole")
    saved(filled(), path)
    return path


@pytest.mark.parametrize("form", FORMS)
def test_an_image_comes_back_with_its_names(tmp_path: Path, form: str) -> None:
    saved(filled(form), tmp_path)
    engine = Engine()
    loaded = load(engine, tmp_path, QUIET)
    expected = filled().find("megatron:24.10")
    found = engine.find("megatron:24.10-0.9.0")
    assert (found.id, found.diff_ids) == (expected.id, expected.diff_ids)
    assert set(found.names) == set(loaded.names) == set(expected.names)
    assert loaded.moved == ()
    assert loaded.documents == DOCUMENTS


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("there", FORMS)
def test_a_thin_one_is_loaded_onto_its_base(
    tmp_path: Path, form: str, there: str, lazy: bool
) -> None:
    """Whether the engine takes an image without the layers that it has, or wants them again."""
    saved(filled(form), tmp_path, thin=True)
    engine = Engine(there, lazy)
    engine.add("copy-of-base:2", BASE_LAYERS)
    load(engine, tmp_path, QUIET)
    assert engine.find("megatron:24.10").id == filled().find("megatron:24.10").id
    assert engine.loads == (1 if lazy else 2)


def test_a_thin_one_without_its_base_is_refused_by_name(tmp_path: Path) -> None:
    saved(filled(), tmp_path, thin=True)
    engine = Engine()
    engine.add("base:1", (BASE_LAYERS[0],))  # that name, but not those layers
    with pytest.raises(EngineError, match=r"no image with them: base:1 \(sha256:") as caught:
        load(engine, tmp_path, QUIET)
    assert "docker pull base:1" in caught.value.remedy
    assert engine.loads == 0


@pytest.mark.parametrize("by_manifest", [False, True])
def test_one_without_what_its_row_shares_is_loaded_beside_another_of_the_row(
    tmp_path: Path, by_manifest: bool
) -> None:
    """Also where it was saved from containerd's store, whose IDs are those of manifests."""
    engine = filled()
    image = image_lookup.find(engine, "megatron:24.10")
    id = f"sha256:{'1' * 64}" if by_manifest else image.id
    shared = BaseImage(name=image.names[0], id=id, digests=(), layers=image.layers[:-1])
    save(engine, image, tmp_path, QUIET, shared)
    there = Engine()
    with pytest.raises(EngineError, match="shares with other images of its row") as caught:
        load(there, tmp_path, QUIET)
    assert "Save it without --thin" in caught.value.remedy
    there.add("megatron:24.10-older", (*BASE_LAYERS, *OWN_LAYERS[:-1], b"older"))
    assert load(there, tmp_path, QUIET).id == image.id


@given(st.data())
def test_any_change_of_any_file_is_told_and_nothing_is_loaded(
    folder: Path, data: st.DataObject
) -> None:
    """A byte, the end of it, or all of it; that file is named and no other."""
    path = data.draw(st.sampled_from(sorted(contents(folder))))
    file, engine = folder / path, Engine()
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = bytes([content[place] ^ data.draw(st.integers(1, 255))])
    damaged = [content[:place] + flipped + content[place + 1 :], content[:place], content + b"\0"]
    file.write_bytes(data.draw(st.sampled_from(damaged)))
    if path != oci_layout.LISTING and data.draw(st.booleans()):
        file.unlink()
    try:
        with pytest.raises(DamagedError) as caught:
            load(engine, folder, QUIET)
    finally:
        file.write_bytes(content)
    assert caught.value.exit_code == 1
    named = [line.strip() for line in caught.value.problem.splitlines()[1:]]
    assert named[0::3] == [path]
    assert engine.loads == 0
    assert not engine.images


def test_all_that_is_wrong_is_told_at_once_with_both_hashes(tmp_path: Path) -> None:
    saved(filled(), tmp_path)
    first, second = sorted((tmp_path / oci_layout.BLOBS).iterdir())[:2]
    first.write_bytes(bytes(first.stat().st_size))
    second.unlink()
    with pytest.raises(DamagedError) as caught:
        check_saved(tmp_path, QUIET)
    text = str(caught.value)
    assert "2 files are damaged" in text
    assert hashlib.sha256(first.read_bytes()).hexdigest() in text
    assert f"{second.name}\n    expected: " in text
    assert "found:    missing" in text
    (tmp_path / oci_layout.LISTING).unlink()
    (tmp_path / oci_layout.LISTING).mkdir()  # what can't be read is damaged, too
    with pytest.raises(DamagedError, match=r"transfer\.json\n    expected: unknown"):
        check_saved(tmp_path, QUIET)


def test_a_folder_without_an_image_and_one_that_is_not_complete_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing was saved there"):
        load(Engine(), tmp_path / "nowhere", QUIET)
    engine = filled()
    engine.ends = 30_000
    with pytest.raises(EngineError):
        saved(engine, tmp_path / "cut")
    with pytest.raises(UsageError, match="cut off"):
        load(Engine(), tmp_path / "cut", QUIET)


@pytest.mark.parametrize("there", [False, True])
def test_an_engine_that_makes_another_image_of_it_gets_no_name(folder: Path, there: bool) -> None:
    """Nor is that image kept, unless the engine had it before: it was removed."""
    engine = Engine()
    if there:
        engine.add("other:1", (b"other",))

    def loads(archive: Iterator[bytes], quiet: bool) -> Iterator[dict[str, str]]:
        assert b"".join(archive)
        other = engine.add("other:1", (b"other",))
        yield {"stream": f"Loaded image ID: {other.id}\n"}

    engine.api.load_image = loads
    with pytest.raises(EngineError, match="the engine made another image of it"):
        load(engine, folder, QUIET)
    assert [one.names for one in engine.images.values()] == [["other:1"]] * there


class Unreadable(Engine):
    """Takes an image over HTTP, from a stick of which a file can't be read by then."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def load(self, archive: Iterator[bytes], quiet: bool) -> Iterator[dict[str, str]]:
        self.file.unlink()
        os.mkfifo(self.file)
        try:
            yield from super().load(archive, quiet)
        except OSError as error:
            raise RequestsConnectionError(ProtocolError("Connection aborted.", error)) from error


@pytest.mark.parametrize("thin", [False, True])
def test_a_file_that_cannot_be_read_any_more_is_told_and_not_as_the_engines(
    tmp_path: Path, thin: bool
) -> None:
    saved(filled(), tmp_path, thin)
    file = max((tmp_path / oci_layout.BLOBS).iterdir(), key=lambda path: path.stat().st_size)
    engine = Unreadable(file)
    engine.add("base:1", BASE_LAYERS)
    with pytest.raises(DamagedError) as caught:
        load(engine, tmp_path, QUIET)
    assert f"  {oci_layout.BLOBS}/{file.name}\n    expected: " in str(caught.value)
    assert "found:    isn't read: it is no regular file" in str(caught.value)
    assert engine.loads == 1


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_does_not_give_all_of_the_base_is_told(tmp_path: Path, fails: bool) -> None:
    saved(filled(), tmp_path, thin=True)
    engine = Engine(lazy=False)
    engine.add("base:1", BASE_LAYERS)
    engine.ends = 30_000

    def broken(name: str, chunk_size: int) -> Iterator[bytes]:
        yield from engine.save(name, chunk_size)
        raise ChunkedEncodingError("Connection broken")

    if fails:
        engine.api.get_image = broken
    with pytest.raises(EngineError, match="the engine ended its stream early"):
        load(engine, tmp_path, QUIET)


def test_names_of_others_are_given_upon_request_alone(tmp_path: Path) -> None:
    """A folder could move docker.io's and nvcr.io's names to its own image."""
    engine = filled()
    saved(engine, tmp_path / "ours")
    engine.tag(engine.find("megatron:24.10").id, "docker.io/library/python", "3")
    other = image_lookup.find(engine, "docker.io/library/python:3")
    save(engine, other, tmp_path / "other", QUIET)
    there = Engine()
    before = there.add("docker.io/library/python:3", (b"before",))
    with pytest.raises(UsageError, match=r"named docker\.io/library/python:3") as caught:
        load(there, tmp_path / "other", QUIET)
    assert "--all-tags" in caught.value.remedy
    assert there.loads == 0
    assert before.names == ["docker.io/library/python:3"]
    loaded = load(there, tmp_path / "other", QUIET, all_tags=True)
    assert loaded.moved == loaded.names == ("docker.io/library/python:3",)
    both = replace(image_lookup.find(filled(), "megatron:24.10"), names=("megatron:1", "mine/x:1"))
    save(filled(), both, tmp_path / "both", QUIET)
    loaded = load(Engine(), tmp_path / "both", QUIET)
    assert (loaded.names, loaded.left) == (("megatron:1",), ("mine/x:1",))


@pytest.mark.parametrize("of", ["image", "manifest"])
def test_another_image_than_the_expected_one_is_refused(folder: Path, of: str) -> None:
    """Before anything is loaded; by the image's ID, or by what `save` said."""
    engine = Engine()
    with pytest.raises(OtherImageError, match=f"expected: sha256:{'0' * 64}") as caught:
        load(engine, folder, QUIET, f"sha256:{'0' * 64}")
    assert caught.value.exit_code == 1
    assert engine.loads == 0
    listing = oci_layout.parse((folder / oci_layout.LISTING).read_bytes(), Listing)
    assert (
        load(engine, folder, QUIET, getattr(listing, of)).id == filled().find("megatron:24.10").id
    )


@pytest.fixture
def documents(empty_site: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """What a build has put beside the image made()."""
    record = {"wheel": {"sha256": WHEEL}}
    monkeypatch.setattr(beside, "record", lambda client, image, name: record)
    beside.write_documents(made(), {"torch": "2.5.0"}, empty_site)
    return beside.texts(IMAGE, empty_site)


def _put_beside(found: dict[str, bytes], site: Settings, built: str = "COPY /stage/ /") -> None:
    engine = Engine()
    engine.histories[IMAGE] = [built]
    put_beside(engine, LoadedImage(IMAGE, (), (), (), found), site, QUIET)


def test_what_this_machine_has_written_beside_an_image_stays(
    empty_site: Settings, documents: dict[str, bytes]
) -> None:
    """A folder's provenance took its place, forged ones too."""
    _put_beside({name: text + b"\n" for name, text in documents.items()}, empty_site)
    assert beside.texts(IMAGE, empty_site) == documents


def test_documents_are_put_beside_the_image_that_they_are_about(
    empty_site: Settings, documents: dict[str, bytes]
) -> None:
    for path in beside.folder(IMAGE, empty_site).iterdir():
        path.unlink()
    forged = documents[beside.PROVENANCE].replace(IMAGE[7:].encode(), b"0" * 64)
    _put_beside({beside.PROVENANCE: forged, beside.SBOM: b"[" * 100_000}, empty_site)
    _put_beside(documents, empty_site, "RUN something")
    assert beside.texts(IMAGE, empty_site) == {}
    _put_beside(documents, empty_site)
    assert beside.texts(IMAGE, empty_site) == documents
