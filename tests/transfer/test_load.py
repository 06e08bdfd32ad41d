"""Loading: checked before anything is given to the engine, whole or thin, named at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requests.exceptions import ChunkedEncodingError
from requests.exceptions import ConnectionError as RequestsConnectionError
from urllib3.exceptions import ProtocolError

from launcher.errors import EngineError, UsageError
from launcher.transfer import images, layout
from launcher.transfer.check import DamagedError, check
from launcher.transfer.layout import Base
from launcher.transfer.load import load
from launcher.transfer.save import save

from .conftest import BASE_LAYERS, FORMS, OWN_LAYERS, Engine, filled
from .test_save import DOCUMENTS, PART, QUIET, contents, saved


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole image, in parts."""
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
    image = images.find(engine, "megatron:24.10")
    id = f"sha256:{'1' * 64}" if by_manifest else image.id
    shared = Base(name=image.names[0], id=id, digests=(), layers=image.layers[:-1])
    save(engine, image, tmp_path, PART, QUIET, shared)
    there = Engine()
    with pytest.raises(EngineError, match="shares with other images of its row") as caught:
        load(there, tmp_path, QUIET)
    assert "Save it without --thin" in caught.value.remedy
    there.add("megatron:24.10-older", (*BASE_LAYERS, *OWN_LAYERS[:-1], b"older"))
    assert load(there, tmp_path, QUIET).id == image.id


@given(st.data())
def test_a_changed_byte_in_any_file_is_told_and_nothing_is_loaded(
    folder: Path, data: st.DataObject
) -> None:
    path = data.draw(st.sampled_from(sorted(contents(folder))))
    file = folder / path
    content = file.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1))
    flipped = data.draw(st.integers(1, 255))
    file.write_bytes(content[:place] + bytes([content[place] ^ flipped]) + content[place + 1 :])
    try:
        _refused(folder, path)
    finally:
        file.write_bytes(content)


@given(st.data())
def test_a_file_that_is_short_long_or_gone_is_told(folder: Path, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(set(contents(folder)) - {layout.LISTING})))
    file = folder / path
    content = file.read_bytes()
    change = data.draw(st.integers(-len(content), 3).filter(bool))
    file.write_bytes(content[:change] if change < 0 else content + b"\0" * change)
    if data.draw(st.booleans()):
        file.unlink()
    try:
        _refused(folder, path)
    finally:
        file.write_bytes(content)


def _refused(folder: Path, path: str) -> None:
    """Loading names `path`, and no other file, and gives the engine nothing."""
    engine = Engine()
    with pytest.raises(DamagedError) as caught:
        load(engine, folder, QUIET)
    assert caught.value.exit_code == 1
    named = [line.strip() for line in caught.value.problem.splitlines()[1:]]
    assert named[0::3] == [path]
    assert engine.loads == 0
    assert not engine.images


def test_all_that_is_wrong_is_told_at_once_with_both_hashes(tmp_path: Path) -> None:
    saved(filled(), tmp_path)
    first, second = sorted((tmp_path / "parts").iterdir())[:2]
    first.write_bytes(b"x")
    second.unlink()
    (tmp_path / layout.LISTING).unlink()
    (tmp_path / layout.LISTING).mkdir()  # what can't be read is damaged, too
    with pytest.raises(DamagedError) as caught:
        check(tmp_path, QUIET)
    text = str(caught.value)
    assert "3 files are damaged" in text
    assert "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881" in text  # of "x"
    assert f"{second.name}\n    expected: " in text
    assert "found:    missing" in text
    assert "transfer.json\n    expected: " in text


def test_a_folder_without_an_image_and_one_that_is_not_complete_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no image was saved there"):
        load(Engine(), tmp_path / "nowhere", QUIET)
    engine = filled()
    engine.ends = 30_000
    with pytest.raises(EngineError):
        saved(engine, tmp_path / "cut")
    with pytest.raises(UsageError, match="cut off"):
        load(Engine(), tmp_path / "cut", QUIET)


def test_a_name_that_moves_is_told(folder: Path) -> None:
    engine = Engine()
    before = engine.add("megatron:24.10", (b"before",))
    loaded = load(engine, folder, QUIET)
    assert loaded.moved == ("megatron:24.10",)
    assert before.names == []


def test_an_engine_that_makes_another_image_of_it_gets_no_name(folder: Path) -> None:
    class Other(Engine):
        def load(self, archive, quiet):  # type: ignore[no-untyped-def]
            assert list(super().load(archive, quiet))
            other = self.add("other:1", (b"other",))
            yield {"stream": f"Loaded image ID: {other.id}\n"}

    engine = Other()
    engine.api.load_image = engine.load
    with pytest.raises(EngineError, match="the engine made another image of it"):
        load(engine, folder, QUIET)
    with pytest.raises(Exception, match="megatron"):
        engine.find("megatron:24.10")


def test_an_engine_that_refuses_is_told(folder: Path) -> None:
    engine = Engine()
    engine.api.load_image = lambda archive, quiet: iter([{"error": "no space left on device"}])
    with pytest.raises(EngineError, match="no space left") as caught:
        load(engine, folder, QUIET)
    assert "docker system df" in caught.value.remedy


class Unreadable(Engine):
    """Takes an image over HTTP, from a stick of which a file can't be read by then."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def load(self, archive: Iterator[bytes], quiet: bool) -> Iterator[dict[str, str]]:
        self.file.unlink()
        self.file.symlink_to("/proc/self/mem")  # gives EIO, and no name with it
        try:
            yield from super().load(archive, quiet)
        except OSError as error:
            raise RequestsConnectionError(ProtocolError("Connection aborted.", error)) from error


@pytest.mark.parametrize("thin", [False, True])
def test_a_file_that_cannot_be_read_any_more_is_told_and_not_as_the_engines(
    tmp_path: Path, thin: bool
) -> None:
    saved(filled(), tmp_path, thin)
    file = sorted((tmp_path / "parts").iterdir())[0]
    engine = Unreadable(file)
    engine.add("base:1", BASE_LAYERS)
    with pytest.raises(DamagedError) as caught:
        load(engine, tmp_path, QUIET)
    assert f"  parts/{file.name}\n    expected: " in str(caught.value)
    assert "found:    can't be read: Input/output error" in str(caught.value)
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
