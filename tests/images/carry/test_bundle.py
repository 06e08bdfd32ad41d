"""Bundles: the same bytes for the same inputs, and what is damaged anywhere is found and named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from launcher.base.errors import BuildError, EngineError, LauncherError, UsageError
from launcher.base.settings import Settings
from launcher.images.builder.downloads import Commit, RowDownloads
from launcher.images.carry import bundle, image_lookup, save
from launcher.images.carry.check import DamagedError
from launcher.images.carry.load import load
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.matrix.recipe import recipe
from launcher.images.sources import fetch, megatron_source
from tests import cut
from tests.images.builder.conftest import checkout, commit_all  # noqa: F401  # a fixture
from tests.test_crashes import KILLED, age, crash

from .conftest import BASE_LAYERS, Engine, filled
from .test_save import QUIET, contents

URL = "https://github.com/NVIDIA/Megatron-LM.git"


def put(site: Settings, folder: Path, content: bytes, name: str) -> Path:
    path = folder / name
    path.write_bytes(content)
    return fetch.store(path, site)


@pytest.fixture
def fetched(empty_site: Settings, tmp_path: Path, checkout: Path) -> RowDownloads:  # noqa: F811
    """A row with two files in the cache, a commit with a history, and an image with two names."""
    commit_all(checkout)
    (checkout / "setup.py").write_text("print('second')\n")
    head = commit_all(checkout)
    at = megatron_source.repository(URL, head, empty_site, at=f"file://{checkout}")
    wheels = tuple(
        put(empty_site, tmp_path, text, f"{text.decode()}-1.whl") for text in (b"b", b"a")
    )
    row = recipe(load_matrix(), load_lock(), "cpu")
    base = filled().find("base:1").id
    return RowDownloads(row, wheels, (Commit(URL, head, at),), {"base:1": base, "b": base})


@pytest.fixture
def folder(fetched: RowDownloads, tmp_path: Path) -> Path:
    """A bundle of it."""
    path = tmp_path / "inputs"
    bundle.write_bundle(path, [fetched], cast("Any", filled()), QUIET)
    return path


def elsewhere(site: Settings, tmp_path: Path) -> Settings:
    return replace(site, cache=tmp_path / "elsewhere")


def test_what_was_packed_is_what_is_taken(
    folder: Path, fetched: RowDownloads, empty_site: Settings, tmp_path: Path
) -> None:
    index = bundle.check_bundle(folder, QUIET)
    assert [row.tag for row in index.rows] == ["cpu"]
    there = elsewhere(empty_site, tmp_path)
    bundle.take_bundle(folder, index, there, QUIET)
    for content in (b"a", b"b"):
        digest = hashlib.sha256(content).hexdigest()
        assert fetch.checked(digest, "", there).read_bytes() == content
    (commit,) = index.commits
    repository = megatron_source.repository(URL, commit.commit, there, at="file:///nowhere")
    assert (
        megatron_source.git(repository, "show", f"{commit.commit}:setup.py") == "print('second')\n"
    )
    fsck = ["git", "-C", str(repository), "fsck", "--full", "--strict"]
    assert subprocess.run(fsck, capture_output=True).returncode == 0
    assert sorted(path.name for path in there.cache.iterdir()) == ["git", "sha256"]
    engine = Engine()
    bundle.load_images(folder, index, cast("Any", engine), QUIET)
    assert sorted(engine.find(fetched.images["base:1"]).names) == ["b:latest", "base:1"]
    # An image of it is a saved image like any other.
    assert load(Engine(), folder / index.images[0].path, QUIET, all_tags=True).id
    assert "a-1.whl" not in [lacks for _, lacks in bundle.unmet(index, there)]


def test_the_same_inputs_in_another_order_and_cache_are_the_same_bytes(
    folder: Path, fetched: RowDownloads, empty_site: Settings, tmp_path: Path
) -> None:
    """Sets have another order in another process."""
    index, there = bundle.check_bundle(folder, QUIET), elsewhere(empty_site, tmp_path)
    for listed in ([one.path for one in index.files], *(one.names for one in index.images)):
        assert [*listed] == sorted(listed)
    bundle.take_bundle(folder, index, there, QUIET)
    own = replace(fetched.commits[0], repository=next((there.cache / "git").iterdir()))
    again = RowDownloads(
        fetched.recipe,
        tuple(sorted((there.cache / "sha256").glob("*/[!.]*"), reverse=True)),
        (own, own),
        dict(reversed(list(fetched.images.items()))),
    )
    bundle.write_bundle(tmp_path / "again", [again, again], cast("Any", filled("oci")), QUIET)
    assert contents(tmp_path / "again") == contents(folder)


def test_another_bundle_in_the_same_folder_leaves_nothing_of_the_first(
    folder: Path, fetched: RowDownloads, tmp_path: Path
) -> None:
    less = replace(fetched, files=fetched.files[:1], commits=(), images={})
    bundle.write_bundle(folder, [less], None, QUIET)
    bundle.write_bundle(tmp_path / "new", [less], None, QUIET)
    assert contents(folder) == contents(tmp_path / "new")


def test_an_image_that_the_engine_does_not_give_whole_makes_no_bundle(
    folder: Path, fetched: RowDownloads
) -> None:
    shutil.rmtree(folder / "images")
    engine = filled()
    engine.ends = 30_000
    with pytest.raises(EngineError, match="the engine ended its stream early"):
        bundle.write_bundle(folder, [fetched], cast("Any", engine), QUIET)
    with pytest.raises(UsageError, match=r"no bundle\.json: .* cut off before its end"):
        bundle.check_bundle(folder, QUIET)


@pytest.mark.parametrize("change", ["flip", "cut", "gone", "pipe", "link"])
def test_a_change_in_any_file_is_told_and_named(folder: Path, change: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "original"
    for path in contents(folder):
        file = folder / path
        content = file.read_bytes()
        file.rename(elsewhere)
        if change == "flip":
            file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        elif change == "cut":
            file.write_bytes(content[:-1])
        elif change == "pipe":
            os.mkfifo(file)
        elif change == "link":
            file.symlink_to(elsewhere)
        unlisted = change == "gone" and path == bundle.INDEX
        with pytest.raises(UsageError if unlisted else DamagedError) as caught:
            bundle.check_bundle(folder, QUIET)
        told = "no bundle.json: " if unlisted else f"\n  {path}\n"
        assert told in str(caught.value), path
        file.unlink(missing_ok=True)
        elsewhere.rename(file)
    bundle.check_bundle(folder, QUIET)


def test_another_image_in_its_place_is_told(folder: Path, tmp_path: Path) -> None:
    """Somebody's own, whole in itself."""
    (place,) = (folder / "images").iterdir()
    index, engine = bundle.check_bundle(folder, QUIET), Engine()
    other = engine.add("base:1", (*BASE_LAYERS, b"more"))
    shutil.rmtree(place)
    save.save(cast("Any", engine), image_lookup.find(engine, other.names[0]), place, QUIET)
    with pytest.raises(DamagedError, match=rf"images/{place.name}/transfer\.json"):
        bundle.check_bundle(folder, QUIET)
    with pytest.raises(DamagedError, match=rf"images/{place.name}/transfer\.json"):
        bundle.load_images(folder, index, cast("Any", engine), QUIET)  # put there meanwhile


def test_what_is_no_bundle_is_told(tmp_path: Path) -> None:
    (tmp_path / "thesis.doc").write_bytes(b"")
    for path in (tmp_path, tmp_path / "thesis.doc", tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="nothing was saved there"):
            bundle.check_bundle(path, QUIET)
    with pytest.raises(UsageError, match=r"it has thesis\.doc in it"):
        bundle.write_bundle(tmp_path, [], None, QUIET)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.doc"]


WHEEL = f"sha256/{'a' * 64}/a.whl"


@pytest.mark.parametrize(
    "index",
    [
        {"format": 2},
        {"files": [{"path": f"sha256/{'a' * 64}/../../x", "size": 1, "sha256": "a" * 64}]},
        {"files": [{"path": "/etc/passwd", "size": 1, "sha256": "a" * 64}]},
        {"files": [{"path": WHEEL, "size": 1, "sha256": "b" * 64}]},
        {"files": [{"path": WHEEL, "size": -5, "sha256": "a" * 64}]},
        {"files": [{"path": WHEEL, "size": 1, "sha256": "a" * 64}] * 2},
        {"commits": [{"url": URL, "commit": "a" * 40}]},
        {"commits": [{"url": "u", "commit": "--upload-pack=x"}]},
        {"images": [{"id": "../x", "names": []}]},
        {"images": [{"id": f"sha256:{'a' * 64}", "names": ["-v/:/host"]}]},
        {"files": [{"path": f"images/{'a' * 64}/../x", "size": 1, "sha256": "a" * 64}]},
    ],
)
def test_a_list_that_somebody_made_up_is_refused(tmp_path: Path, index: dict[str, object]) -> None:
    """By somebody who can compute a sha256."""

    def forge(**more: object) -> None:
        whole = {"format": 3, "rows": [], "files": [], "commits": [], "images": [], **more}
        unsigned = json.dumps(whole | {"sha256": ""}, indent=1, sort_keys=True) + "\n"
        own = hashlib.sha256(unsigned.encode()).hexdigest()
        text = json.dumps(whole | {"sha256": own}, indent=1, sort_keys=True) + "\n"
        (tmp_path / bundle.INDEX).write_text(text)

    forge()
    assert bundle.check_bundle(tmp_path, QUIET).files == ()
    forge(**index)
    with pytest.raises(LauncherError):
        bundle.check_bundle(tmp_path, QUIET)


def test_a_cached_file_with_another_byte_is_not_packed(
    fetched: RowDownloads, tmp_path: Path
) -> None:
    path = fetched.files[0]
    path.write_bytes(b"x")
    with pytest.raises(BuildError, match=path.parent.name):
        bundle.write_bundle(tmp_path / "new", [fetched], cast("Any", filled()), QUIET)
    assert not (tmp_path / "new" / bundle.INDEX).exists()


def test_a_name_that_another_image_has_stays_with_that(folder: Path) -> None:
    """A bundle of somebody else's could move python:3.11 to an image of its own."""
    engine = Engine()
    mine = engine.add("base:1", (b"mine",))
    index = bundle.check_bundle(folder, QUIET)
    with pytest.raises(EngineError, match=mine.id) as caught:
        bundle.load_images(folder, index, cast("Any", engine), QUIET)
    assert caught.value.remedy.endswith("docker rmi base:1")
    assert mine.names == ["base:1"]


@pytest.mark.long
@pytest.mark.skipif(bool(cut.unsupported), reason=cut.unsupported)
def test_a_bundle_that_was_cut_off_anywhere_is_mended_by_the_next(
    fetched: RowDownloads, tmp_path: Path
) -> None:
    """Killed, on a full disk or a read-only one: it is whole, or says what it lacks."""
    less, place = replace(fetched, files=fetched.files[:1], commits=()), tmp_path / "in"
    place.mkdir()

    def work() -> None:
        bundle.write_bundle(place / "bundle", [less], cast("Any", filled()), QUIET)

    work()
    whole = contents(place / "bundle")
    shutil.rmtree(place / "bundle")

    def holds() -> None:
        with suppress(LauncherError):
            index = bundle.check_bundle(place / "bundle", QUIET)
            assert [row.tag for row in index.rows] == ["cpu"]
        work()
        bundle.check_bundle(place / "bundle", QUIET)
        assert contents(place / "bundle") == whole

    crash(place, work, holds, 40)


@pytest.mark.skipif(bool(cut.unsupported), reason=cut.unsupported)
@pytest.mark.parametrize(
    "errors", [[KILLED], pytest.param([errno.ENOSPC, errno.EROFS], marks=pytest.mark.long)]
)
def test_what_is_taken_is_whole_and_nothing_else_is_left(
    folder: Path, empty_site: Settings, tmp_path: Path, errors: list[int]
) -> None:
    place = tmp_path / "in"
    place.mkdir()
    there, index = replace(empty_site, cache=place / "cache"), bundle.check_bundle(folder, QUIET)
    index = index.model_copy(update={"commits": ()})

    def work() -> None:
        bundle.take_bundle(folder, index, there, QUIET)

    def holds() -> None:
        for left in there.cache.glob(".scratch-*"):
            age(left)  # an empty one is left for a minute
        work()
        for content in (b"a", b"b"):
            digest = hashlib.sha256(content).hexdigest()
            assert fetch.checked(digest, "", there).read_bytes() == content
        assert sorted(path.name for path in there.cache.iterdir()) == ["sha256"]

    crash(place, work, holds, 15, errors)
