"""Bundles: the same bytes for the same inputs, and a flipped byte anywhere is found and named."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher import files
from launcher.build import fetch, source
from launcher.build.inputs import Commit
from launcher.errors import BuildError, EngineError, UsageError
from launcher.images import bundle
from launcher.images.bundle import Index, PackedRow
from launcher.progress import Progress
from launcher.settings import Settings
from tests.build.conftest import checkout, commit_all  # noqa: F401

from .conftest import FORMS, OWN_LAYERS, Engine, filled

if TYPE_CHECKING:
    from docker import DockerClient

ROWS = [PackedRow(tag="cpu", megatron="0.16.1")]
IMAGE = "sha256:" + "ab" * 32
SAVED = bytes(range(256)) * 300 + bytes(1024)
NAMED = f"sha256/{'a' * 64}/a.whl"
URL = "https://github.com/NVIDIA/Megatron-LM.git"


def put(site: Settings, folder: Path, content: bytes, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return fetch.store(path, site)


def saved(id: str) -> Iterator[bytes]:
    yield from chunks(SAVED)


def chunks(content: bytes) -> Iterator[bytes]:
    return (content[at : at + 7000] for at in range(0, len(content), 7000))


@pytest.fixture
def quiet() -> Progress:
    return Progress(io.StringIO())


@pytest.fixture
def commit(empty_site: Settings, checkout: Path) -> Commit:  # noqa: F811
    """A commit in the cache, as git fetches it from a repository with a history."""
    commit_all(checkout)
    (checkout / "setup.py").write_text("print('second')\n")
    head = commit_all(checkout)
    at = source.repository(URL, head, empty_site, at=f"file://{checkout}")
    return Commit(URL, head, at)


@pytest.fixture
def packed(
    empty_site: Settings,
    tmp_path: Path,
    commit: Commit,
    quiet: Progress,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A bundle with two files, a commit and an image in several parts."""
    monkeypatch.setattr(bundle, "PART", 30000)
    files = [
        put(empty_site, tmp_path, text, f"{text.decode() * 90}-1.whl") for text in (b"b", b"a")
    ]
    path = tmp_path / "inputs.tar"
    with bundle.replacing(path) as out:
        bundle.pack(out, ROWS, files, [commit], {IMAGE: ["base:1", "b:2"]}, saved, quiet)
    return path


def elsewhere(site: Settings, tmp_path: Path) -> Settings:
    return replace(site, cache=tmp_path / "elsewhere")


def test_what_was_packed_is_what_is_taken(
    packed: Path, empty_site: Settings, commit: Commit, tmp_path: Path, quiet: Progress
) -> None:
    index = bundle.check(packed)
    assert index.rows == ROWS
    assert index.images[0].names == ["b:2", "base:1"]
    assert len(index.images[0].parts) == 3
    there = elsewhere(empty_site, tmp_path)
    bundle.take(packed, index, there, quiet)
    for content in (b"a", b"b"):
        digest = hashlib.sha256(content).hexdigest()
        assert fetch.checked(digest, "", there).read_bytes() == content
    repository = source.repository(URL, commit.commit, there, at="file:///nowhere")
    assert source.git(repository, "show", f"{commit.commit}:setup.py") == "print('second')\n"
    fsck = ["git", "-C", str(repository), "fsck", "--full", "--strict"]
    assert subprocess.run(fsck, capture_output=True).returncode == 0
    assert sorted(path.name for path in there.cache.iterdir()) == ["git", "sha256"]


def test_what_is_there_already_is_left_as_it_is(
    packed: Path, empty_site: Settings, quiet: Progress
) -> None:
    before = sorted(path.stat().st_mtime_ns for path in (empty_site.cache / "sha256").glob("*/*"))
    bundle.take(packed, bundle.check(packed), empty_site, quiet)
    after = sorted(path.stat().st_mtime_ns for path in (empty_site.cache / "sha256").glob("*/*"))
    assert after == before


def test_the_same_inputs_in_another_order_and_cache_are_the_same_bytes(
    packed: Path, empty_site: Settings, commit: Commit, tmp_path: Path, quiet: Progress
) -> None:
    there = elsewhere(empty_site, tmp_path)
    bundle.take(packed, bundle.check(packed), there, quiet)
    files = sorted((there.cache / "sha256").glob("*/[!.]*"), reverse=True)
    own = replace(commit, repository=next((there.cache / "git").iterdir()))
    again = tmp_path / "again.tar"
    with bundle.replacing(again) as out:
        bundle.pack(out, ROWS * 2, files * 2, [own, own], {IMAGE: ["b:2", "base:1"]}, saved, quiet)
    assert again.read_bytes() == packed.read_bytes()


@pytest.mark.parametrize("given", [SAVED[:-1024], SAVED[:-1], SAVED + b'{"error": "disk"}', b""])
def test_an_image_that_the_engine_does_not_give_whole_is_not_packed(
    tmp_path: Path, quiet: Progress, given: bytes
) -> None:
    path = tmp_path / "inputs.tar"
    with (
        pytest.raises(EngineError, match="base:1: the engine ended its stream early"),
        bundle.replacing(path) as out,
    ):
        bundle.pack(out, ROWS, [], [], {IMAGE: ["base:1"]}, lambda _: chunks(given), quiet)
    assert not [*tmp_path.iterdir()]


def test_a_folder_is_no_place_for_a_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path, Path()):
        with pytest.raises(UsageError, match="is a folder"), bundle.replacing(folder) as out:
            out.write(b"packed")
    assert not [*tmp_path.parent.glob("*.part")]


def test_any_tar_can_read_it(packed: Path, tmp_path: Path) -> None:
    with tarfile.open(packed) as tar:
        names = tar.getnames()
    listed = subprocess.run(["tar", "-tf", str(packed)], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines() == names
    assert listed.stderr == ""
    assert names[-2:] == ["bundle.json", "bundle.seal"]
    assert [name.partition("/")[0] for name in names[:-2]] == [
        *("sha256", "sha256", "git", "images", "images", "images")
    ]


def test_a_file_of_more_than_8_gib_can_be_a_member() -> None:
    with tarfile.open(fileobj=io.BytesIO(bundle._header("sha256/x", 9 << 30))) as tar:
        assert tar.next().size == 9 << 30  # type: ignore[union-attr]


def test_two_that_write_the_same_file_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "inputs.tar"
    with bundle.replacing(path) as out:
        second = bundle.replacing(path)
        with pytest.raises(UsageError, match="another launcher is writing"):
            second.__enter__()
        out.write(b"first")
    assert path.read_bytes() == b"first"
    files.aside_path(path, "0" * 16).write_bytes(b"left by one that was killed")
    with bundle.replacing(path) as out:
        out.write(b"second")
    assert path.read_bytes() == b"second"
    assert [one.name for one in tmp_path.iterdir()] == ["inputs.tar"]


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_anywhere_is_found(packed: Path, place: float, flip: int) -> None:
    content = bytearray(packed.read_bytes())
    content[int(place * len(content))] ^= flip
    damaged = packed.with_name("damaged.tar")
    damaged.write_bytes(content)
    with pytest.raises(UsageError, match="damaged"):
        bundle.check(damaged)


def test_every_kind_of_member_is_named_when_a_byte_of_it_flips(packed: Path) -> None:
    content = packed.read_bytes()
    with tarfile.open(packed) as tar:
        members = tar.getmembers()
    assert len(members) == 8
    for member in members:
        for at in (
            member.offset,
            member.offset + 511,
            member.offset_data,
            member.offset_data + 511,
        ):
            flipped = bytearray(content)
            flipped[at] ^= 1
            packed.write_bytes(flipped)
            with pytest.raises(UsageError, match="damaged") as caught:
                bundle.check(packed)
            if member.name == "bundle.seal":
                assert "damaged" in str(caught.value)
            else:
                assert f"\n  {member.name}" in str(caught.value)


def test_all_that_is_damaged_is_named(packed: Path) -> None:
    content = bytearray(packed.read_bytes())
    with tarfile.open(packed) as tar:
        chosen = [tar.getmembers()[n] for n in (0, 2, 4)]
    for member in chosen:
        content[member.offset_data] ^= 1
    packed.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        bundle.check(packed)
    named = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    assert named == [member.name for member in chosen]


@pytest.mark.parametrize("kept", [0, 100, 3000, 40960, -1, -600, -2048])
def test_a_copy_that_was_cut_short_is_refused(packed: Path, kept: int) -> None:
    packed.write_bytes(packed.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"is not a bundle of `launcher fetch`, or"):
        bundle.check(packed)


def test_a_piece_missing_in_the_middle_is_found(packed: Path) -> None:
    content = packed.read_bytes()
    packed.write_bytes(content[:2048] + content[4096:])
    with pytest.raises(UsageError, match=r"damaged.*\n  bundle\.json"):
        bundle.check(packed)


def test_a_disk_that_can_not_be_read_is_told_with_the_file() -> None:
    with (
        Path("/proc/self/mem").open("rb") as file,
        pytest.raises(UsageError, match="/proc/self/mem: can't be read at byte 0: Input/output"),
    ):
        next(bundle._blocks(file, 0, 10))


def test_another_file_is_no_bundle(tmp_path: Path) -> None:
    path = tmp_path / "other.tar"
    with tarfile.open(path, "w") as tar:
        tar.add(__file__)
    with pytest.raises(UsageError, match="is not a bundle"):
        bundle.check(path)


def sealed(tmp_path: Path, **index: object) -> Path:
    """A bundle with nothing in it, whose index is made up by somebody who can compute a sha256."""
    import json

    whole = {"format": 1, "rows": [], "files": [], "commits": [], "images": [], "members": []}
    out = io.BytesIO()
    bundle._Writer(out).end(json.dumps(whole | index).encode())
    path = tmp_path / "forged.tar"
    path.write_bytes(out.getvalue())
    return path


@pytest.mark.parametrize(
    "index",
    [
        {"format": 2},
        {"files": [f"sha256/{'a' * 64}/../../x"]},
        {"files": ["/etc/passwd"]},
        {"members": [["../x", 1, "a" * 64]]},
        {"commits": [{"url": "u", "commit": "--upload-pack=x", "path": f"git/{'a' * 40}.pack"}]},
        {"files": [NAMED]},
        {"files": [NAMED], "members": [[NAMED, 1, "b" * 64]]},
        {"members": [[NAMED, -5, "a" * 64]]},
    ],
)
def test_an_index_that_says_something_else_is_refused(
    tmp_path: Path, index: dict[str, object]
) -> None:
    assert bundle.check(sealed(tmp_path)).members == []
    with pytest.raises(UsageError, match="which this one can't read"):
        bundle.check(sealed(tmp_path, **index))


def test_a_cached_file_with_another_byte_is_not_packed(
    empty_site: Settings, tmp_path: Path, quiet: Progress
) -> None:
    path = put(empty_site, tmp_path, b"wheel", "a-1.whl")
    path.write_bytes(b"whEel")
    target = tmp_path / "inputs.tar"
    target.write_bytes(b"before")
    with pytest.raises(BuildError) as caught, bundle.replacing(target) as out:
        bundle.pack(out, ROWS, [path], [], {}, saved, quiet)
    assert hashlib.sha256(b"wheel").hexdigest() in str(caught.value)
    assert hashlib.sha256(b"whEel").hexdigest() in str(caught.value)
    assert target.read_bytes() == b"before"
    assert sorted(one.name for one in tmp_path.glob("inputs*")) == ["inputs.tar"]


def with_image(out: Path, there: Engine, id: str, names: list[str], listed: str = "") -> Index:
    """A bundle of one image, as `there` saves it, that lists it as `listed`."""

    def save(_: str) -> Iterator[bytes]:
        return there.save(id, chunk_size=7000)

    with bundle.replacing(out) as file:
        bundle.pack(file, ROWS, [], [], {listed or id: names}, save, Progress(io.StringIO()))
    return bundle.check(out)


@pytest.mark.parametrize("form", FORMS)
def test_an_image_gets_the_names_of_the_list_and_none_of_its_stream(
    form: str, tmp_path: Path, quiet: Progress
) -> None:
    there, here = filled(form), filled(form)
    image = there.add("other:1", OWN_LAYERS)
    there.told = ["base:1", "docker.io/library/python:3.11"]
    index = with_image(tmp_path / "a.tar", there, image.id, ["other:1"])
    base = here.find("base:1").id
    bundle.load(tmp_path / "a.tar", index, cast("DockerClient", here), quiet)
    assert here.find("other:1").id == image.id
    assert here.find("base:1").id == base
    assert here.find(image.id).names == ["other:1"]


def test_another_image_than_the_listed_is_refused_and_removed(
    tmp_path: Path, quiet: Progress
) -> None:
    there, here = filled(), filled()
    image = there.add("other:1", OWN_LAYERS)
    index = with_image(tmp_path / "a.tar", there, image.id, ["other:1"], listed=IMAGE)
    with pytest.raises(EngineError, match=f"lists {IMAGE}, and what it holds is {image.id}"):
        bundle.load(tmp_path / "a.tar", index, cast("DockerClient", here), quiet)
    assert image.id not in here.images


def test_a_name_that_another_image_has_stays_with_it(tmp_path: Path, quiet: Progress) -> None:
    there, here = filled(), filled()
    image, base = there.add("other:1", OWN_LAYERS), here.find("base:1").id
    index = with_image(tmp_path / "a.tar", there, image.id, ["base:1"])
    with pytest.raises(EngineError, match=r"the engine has .* under that name") as caught:
        bundle.load(tmp_path / "a.tar", index, cast("DockerClient", here), quiet)
    assert caught.value.remedy.endswith("docker rmi base:1")
    assert here.find("base:1").id == base
