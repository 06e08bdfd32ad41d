"""What is left when the process is killed before any one of its system calls: the old, or the new.

Not at random: at each call that changes a file, one after the other.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.agent.checkpoints import completeness, folders, lineage
from launcher.base import files, owned
from launcher.base.settings import settings
from launcher.images.matrix.matrix_file import load_lock
from launcher.images.sources import lock
from launcher.runs.datasets import indexed
from launcher.runs.records import record
from launcher.tools.weights import convert
from tests import cut

pytestmark = pytest.mark.skipif(bool(cut.unsupported), reason=cut.unsupported)
REMOVING = {"unlink", "unlinkat", "rmdir"}
NAMING = {"rename"}
"""What is removed is taken out of its place by renameat before."""

KILLED = 0
"""In place of an error of `crash`."""


def crash(
    folder: Path,
    work: Callable[[], object],
    holds: Callable[[], None],
    least: int,
    errors: Sequence[int] = (errno.ENOSPC, KILLED),
) -> list[str]:
    """Cut `work` at each call; `holds` each time, in `folder` as it was before. All of its calls.

    So it does where a call finds the disk full; a file system that is read-only is another error in
    the same place. `least` is how many there are at the least, so that none is tried on nothing.
    """
    before = folder.with_name("before")
    shutil.copytree(folder, before, symlinks=True)
    called: list[str] = []
    for error in errors:
        for called in cut.cuts(work, error):  # noqa: B007
            holds()
            shutil.rmtree(folder)
            shutil.copytree(before, folder, symlinks=True)
    shutil.rmtree(before)
    assert len(called) >= least
    return called


def assert_synced(called: list[str]) -> None:
    """Nothing is removed before what was named is on the disk, nor named before it is."""
    changes = [call for call in called if call in REMOVING | NAMING | {"fsync", "write"}]
    for first, second in pairwise(changes):
        assert not (first in NAMING and second in REMOVING), called
        assert not (first == "write" and second in NAMING), called


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def test_a_file_is_the_old_or_the_new(folder: Path) -> None:
    path = folder / "state"
    files.write(path, "old" * 1000)

    def holds() -> None:
        assert path.read_text() in ("old" * 1000, "new" * 5000)
        files.write(path, "next")
        assert os.listdir(folder) == ["state"]

    assert_synced(crash(folder, lambda: files.write(path, "new" * 5000), holds, 4))


def test_a_folder_is_whole_or_gone(folder: Path) -> None:
    made = owned.make_folder(folder / "made")
    (made / "inner").mkdir()
    for name in ("a", "inner/b"):
        (made / name).write_text(name)

    def holds() -> None:
        if made.exists():
            assert sorted(os.listdir(made)) == [owned.MARKER, "a", "inner"]
            assert (made / "inner/b").exists()
        else:
            owned.make_folder(made)
        owned.remove_folder(made, folder)
        assert not os.listdir(folder)

    crash(folder, lambda: owned.remove_folder(made, folder), holds, 6)


def test_a_model_is_whole_or_goes_with_the_next_command(folder: Path) -> None:
    """A killed command left a hidden folder as large as the model, for ever."""

    def work() -> None:
        with convert.new_folder(folder / "model") as new:
            (new / "weights").write_text("new")

    def holds() -> None:
        for left in folder.glob(".*"):  # without a marker it is left for a minute
            if not (left / owned.MARKER).exists() or not (left / owned.MARKER).stat().st_size:
                age(left)
        owned.sweep_folders(folder)
        assert {*os.listdir(folder)} <= {"model"}
        if (folder / "model").exists():
            assert (folder / "model/weights").read_text() == "new"

    assert_synced(crash(folder, work, holds, 10))


def age(path: Path) -> None:
    for each in (*path.glob("*"), path):
        os.utime(each, (0, 0))


def checkpoint(path: Path, text: str) -> None:
    """A checkpoint of the distributed format that is complete, as far as files tell."""
    path.mkdir(parents=True)
    (path / "weights").write_text(text)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')


@pytest.fixture
def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is whole where its last file is there: the format is tested elsewhere."""
    monkeypatch.setattr(
        completeness, "problem", lambda path: "" if (path / "metadata.json").exists() else "cut"
    )


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("again", [False, True])
def test_a_checkpoint_is_the_old_or_the_new(folder: Path, again: bool) -> None:
    """Of an iteration that was saved before, neither was left, 4 of 12 times."""
    lineage.claim(folder, "run-a", "run-a")
    for iteration in (3, 6) if again else (3,):
        checkpoint(folders.partial(folder, iteration), "old")
        folders.publish(folder, iteration)
    checkpoint(folders.partial(folder, 6), "new")

    def holds() -> None:
        seen = folders.newest_complete(folder)
        assert seen is not None
        folders.set_aside(folder, "run-a")
        newest = folders.newest_complete(folder, "run-a")
        assert newest is not None
        assert newest.iteration == seen.iteration
        assert newest.folder == folders.folder(folder, newest.iteration)
        assert newest.iteration >= (6 if again else 3)
        assert (newest.folder / "weights").read_text() in ("old", "new")
        assert folders.noted(folder) == str(newest.iteration)
        assert (folders.folder(folder, 3) / "weights").read_text() == "old"
        assert not [*folder.glob("*.replaced"), *folder.glob("*.ready")]

    assert_synced(crash(folder, lambda: folders.publish(folder, 6), holds, 12))


@pytest.mark.usefixtures("whole")
def test_the_newest_checkpoint_is_whole_while_older_ones_go(folder: Path) -> None:
    lineage.claim(folder, "run-a", "run-a")
    for iteration in (3, 6, 9):
        checkpoint(folders.partial(folder, iteration), "old")
        folders.publish(folder, iteration)

    def holds() -> None:
        whole = [
            each.iteration for each in [*folders.newest_first(folder)][::-1] if not each.problem
        ]
        assert whole in ([3, 6, 9], [6, 9], [3, 9], [9])  # 3 may stay where it couldn't be removed
        folders.clear(folder, "run-a")
        folders.prune(folder, 1, "run-a")
        named = {folders.TRACKER, lineage.NOTE, "iter_0000009"}
        assert {name for name in os.listdir(folder) if not name.startswith(".")} == named

    crash(folder, lambda: folders.prune(folder, 1, "run-a"), holds, 8)


def pair(prefix: Path, tokens: list[int]) -> None:
    indexed.write(prefix, [tokens], 257)


@pytest.mark.parametrize("older", [False, True])
def test_data_files_are_the_old_pair_or_the_new(folder: Path, older: bool) -> None:
    """A .bin was left without its .idx, and the old pair gone, 3 of 82 times."""
    prefix = folder / "data"
    if older:
        pair(prefix, [1, 2, 3])

    def holds() -> None:
        there = [path for path in (folder / "data.bin", folder / "data.idx") if path.exists()]
        if older or there:
            assert indexed.read_filled_index(prefix).tokens in (3, 5)
        pair(prefix, [1, 2, 3, 4])
        assert indexed.read_filled_index(prefix).tokens == 4
        assert sorted(os.listdir(folder)) == ["data.bin", "data.idx"]

    assert_synced(crash(folder, lambda: pair(prefix, [1, 2, 3, 4, 5]), holds, 12))


def test_a_records_file_is_the_old_or_the_new(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNS", str(folder))
    record.put("run-a", "file.json", "old")

    def holds() -> None:
        assert (folder / "run-a/file.json").read_text() in ('"old"\n', '"new"\n')

    assert_synced(crash(folder, lambda: record.put("run-a", "file.json", "new"), holds, 4))


def test_the_lock_is_the_old_or_the_new(folder: Path) -> None:
    held = load_lock(settings().matrix.with_name("matrix.lock"))
    assert held is not None
    path, text = folder / "matrix.lock", lock.dump(held)
    lock.write(held, path)

    def holds() -> None:
        assert path.read_text() == text

    assert_synced(crash(folder, lambda: lock.write(held, path), holds, 4))
