"""Which checkpoints are complete, which are set aside, and which are removed."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.agent.checkpoints import completeness, folders, lineage, pickles

RUN = "0a1b2c3d"
ITEMS = (("__0_0.distcp", 0, 60), ("__0_0.distcp", 60, 40), ("__1_0.distcp", 0, 30))


def archive(path: Path, content: Any) -> None:
    """A file as torch saves it: a zip archive with a pickle in it."""
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", pickle.dumps(content))
        made.writestr("archive/data/0", bytes(16))


def distributed(folder: Path) -> None:
    """Megatron's distributed format; of the attributes in torch's index, those looked at."""
    folder.mkdir(parents=True)
    (folder / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "common_backend": "torch"}'
    )
    archive(folder / "common.pt", {"iteration": 3})
    items = {
        (name, offset): SimpleNamespace(relative_path=name, offset=offset, length=length)
        for name, offset, length in ITEMS
    }
    (folder / ".metadata").write_bytes(pickle.dumps(SimpleNamespace(storage_data=items)))
    (folder / "__0_0.distcp").write_bytes(bytes(100))
    (folder / "__1_0.distcp").write_bytes(bytes(30))


def plain(folder: Path) -> None:
    """What torch alone saves."""
    distributed(folder)
    (folder / "metadata.json").unlink()
    (folder / "common.pt").unlink()


def joined(folder: Path) -> None:
    """Megatron's from 0.19 on: what all ranks have alike is among the rest."""
    distributed(folder)
    index = pickle.loads((folder / ".metadata").read_bytes())  # noqa: S301 - our own
    index.common = "common_state/shard_0_1"
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / "common.pt").unlink()


def legacy(folder: Path) -> None:
    """A folder a rank, with the distributed optimizer's state beside the weights."""
    arguments = Namespace(
        tensor_model_parallel_size=2, use_distributed_optimizer=True, no_save_optim=None
    )
    for rank in ("mp_rank_00", "mp_rank_01"):
        (folder / rank).mkdir(parents=True)
        archive(folder / rank / "model_optim_rng.pt", {"args": arguments, "iteration": 3})
        archive(folder / rank / "distrib_optim.pt", {})


def look_here(stream: IO[bytes], what: str = "nothing") -> Any:
    """What another process says of a pickle, without one: a Python is 70 ms of CPU."""
    return pickles.LOOKS[what](pickles.Reader(stream).load())


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def tracked(root: Path, text: object) -> None:
    (root / folders.TRACKER).write_text(str(text))


def claimed(root: Path) -> None:
    """What comes after it is of the run."""
    lineage.claim(root, RUN, RUN)


def problems(root: Path) -> dict[str, str]:
    return {each.folder.name: each.problem for each in [*folders.newest_first(root)][::-1]}


@pytest.fixture(scope="module", params=[distributed, joined, plain, legacy])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each format, which a test leaves as it is."""
    folder: Path = tmp_path_factory.mktemp("saved") / "iter_0000003"
    request.param(folder)
    tracked(folder.parent, "3\n")
    return folder


@contextmanager
def other_bytes(path: Path, content: bytes) -> Iterator[None]:
    before = path.read_bytes()
    path.write_bytes(content)
    yield
    path.write_bytes(before)


@settings(deadline=None)
@given(data=st.data())
def test_any_file_cut_anywhere_is_found(whole: Path, data: st.DataObject) -> None:
    victim = data.draw(st.sampled_from(files(whole)))
    left = data.draw(st.integers(0, victim.stat().st_size - 1))
    with other_bytes(victim, victim.read_bytes()[:left]):
        assert victim.name in completeness.problem(whole)


def test_any_file_missing_is_found(whole: Path) -> None:
    found = folders.CheckpointFolder(3, whole)
    assert (
        [*folders.newest_first(whole.parent)][::-1]
        == [folders.newest_complete(whole.parent)]
        == [found]
    )
    for path in files(whole):
        with other_bytes(path, b""):
            path.unlink()
            assert completeness.problem(whole).endswith("is missing"), path
    assert completeness.problem(whole) == ""


@pytest.mark.megatron
def test_what_torch_saves_by_rank(tmp_path: Path) -> None:
    """As upstream's programs do; a distributed checkpoint of torch's is in test_gpt."""
    import torch

    legacy(tmp_path)
    arguments = Namespace(tensor_model_parallel_size=2, pipeline_model_parallel_size=1)
    state = {"args": arguments, "model": {"weight": torch.arange(1000.0)}, "iteration": 3}
    for path in tmp_path.glob("*/model_optim_rng.pt"):
        torch.save(state, path)
    assert completeness.problem(tmp_path) == ""
    for path in tmp_path.glob("*/model_optim_rng.pt"):
        whole = path.read_bytes()
        os.truncate(path, len(whole) - 1)
        assert completeness.problem(tmp_path) == "model_optim_rng.pt is cut short"
        path.write_bytes(whole)


def test_a_ranks_whole_folder_missing_is_found(tmp_path: Path) -> None:
    legacy(tmp_path)
    shutil.rmtree(tmp_path / "mp_rank_01")
    assert completeness.problem(tmp_path) == "there are 1 of 2 folders mp_rank_…"


NAMES = "its saving was interrupted: latest_checkpointed_iteration.txt names"


@pytest.mark.parametrize(
    ("tracker", "problem"),
    [
        ("4", ""),
        ("3", ""),
        ("2", f"{NAMES} 2"),
        ("release", f"{NAMES} release"),
        (None, "its saving was interrupted: there is no latest_checkpointed_iteration.txt"),
        ("", ""),
    ],
)
def test_what_the_tracker_says_counts(tmp_path: Path, tracker: str | None, problem: str) -> None:
    """An empty one is what a full disk leaves: the checkpoint before is as good as ever."""
    distributed(tmp_path / "iter_0000003")
    if tracker is not None:
        tracked(tmp_path, tracker)
    assert problems(tmp_path) == {"iter_0000003": problem}


def test_a_release_is_a_checkpoint(tmp_path: Path) -> None:
    legacy(tmp_path / "release")
    tracked(tmp_path, "release\n")
    assert folders.newest_complete(tmp_path) == folders.CheckpointFolder(0, tmp_path / "release")
    assert folders.prune(tmp_path, 1, RUN) == []


@pytest.mark.parametrize("root", ["nowhere", "file", "."])
def test_no_checkpoints(tmp_path: Path, root: str) -> None:
    (tmp_path / "file").touch()
    assert [*folders.newest_first(tmp_path / root)] == []
    assert folders.newest_complete(tmp_path / root) is None
    assert folders.set_aside(tmp_path / root, RUN) == []


def three(root: Path) -> None:
    """Complete at 3 and 6, cut short at 9, which the tracker names, and 12 being written."""
    claimed(root)
    for iteration in (3, 6, 9):
        distributed(folders.folder(root, iteration))
    os.truncate(root / "iter_0000009/__0_0.distcp", 99)
    distributed(folders.partial(root, 12))
    tracked(root, 9)


def test_a_tracker_that_is_too_long_is_refused_by_name(tmp_path: Path) -> None:
    """10,000 digits were cut to 64 of them without a word."""
    (tmp_path / folders.TRACKER).write_text("1" * 10_000)
    with pytest.raises(PermissionError, match=r"more than 64 bytes"):
        folders.noted(tmp_path)


def test_incomplete_ones_are_set_aside(tmp_path: Path) -> None:
    three(tmp_path)
    (tmp_path / "iter_0000009.incomplete").mkdir()
    assert folders.set_aside(tmp_path, RUN) == [
        tmp_path / "iter_0000009.incomplete.2",
        tmp_path / "iter_0000012.incomplete",
    ]
    assert (tmp_path / folders.TRACKER).read_text() == "6"
    assert problems(tmp_path) == {"iter_0000003": "", "iter_0000006": ""}
    assert (tmp_path / "iter_0000009.incomplete.2/common.pt").exists()
    assert folders.set_aside(tmp_path, RUN) == []


@pytest.mark.parametrize("kind", ["partial", "cut short"])
def test_what_kills_left_goes_once_a_later_one_is_complete(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kill in a save left a folder for ever."""
    monkeypatch.setattr(pickles, "look", look_here)
    claimed(tmp_path)
    distributed(folders.folder(tmp_path, 3))
    tracked(tmp_path, 3)
    for _ in range(25):
        path = folders.folder(tmp_path, 6)
        distributed(path.with_suffix(folders.PARTIAL) if kind == "partial" else path)
        if kind == "cut short":
            os.truncate(path / "__0_0.distcp", 99)
        [moved] = folders.set_aside(tmp_path, RUN)
        assert folders.clear(tmp_path, RUN) == []
        assert moved.exists()
    distributed(folders.folder(tmp_path, 6))
    tracked(tmp_path, 6)
    assert folders.clear(tmp_path, "another") == []
    assert len(folders.clear(tmp_path, RUN)) == 25
    assert [*tmp_path.glob("*incomplete*")] == []
    assert problems(tmp_path) == {"iter_0000003": "", "iter_0000006": ""}


@pytest.mark.parametrize("kind", ["complete once", "tracker edited", "user's"])
def test_what_no_kill_left_stays(tmp_path: Path, kind: str) -> None:
    """A whole one that a user went back past and one that was damaged are the user's."""
    claimed(tmp_path)
    for iteration in (3, 6):
        distributed(folders.folder(tmp_path, iteration))
    tracked(tmp_path, 3 if kind == "tracker edited" else 6)
    if kind == "complete once":
        os.truncate(tmp_path / "iter_0000006/__0_0.distcp", 99)
    if kind == "user's":
        (tmp_path / "iter_0000006").rename(tmp_path / "iter_0000006.incomplete")
        lineage.put(tmp_path / "iter_0000006.incomplete", lineage.LineageNote(RUN, RUN))
        tracked(tmp_path, 3)
    folders.set_aside(tmp_path, RUN)
    distributed(folders.folder(tmp_path, 9))
    tracked(tmp_path, 9)
    assert folders.clear(tmp_path, RUN) == []
    assert (tmp_path / "iter_0000006.incomplete/common.pt").exists()


def test_older_ones_than_the_newest_complete_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    three(tmp_path)
    read: list[str] = []
    problem = completeness.problem
    monkeypatch.setattr(completeness, "problem", lambda at: read.append(at.name) or problem(at))
    newest = folders.newest_complete(tmp_path)
    assert newest == folders.CheckpointFolder(6, tmp_path / "iter_0000006")
    assert folders.since_complete(tmp_path) == [*folders.newest_first(tmp_path)][::-1][1:]
    assert read[:4] == ["iter_0000009", "iter_0000006"] * 2
    assert folders.since_complete(tmp_path / "iter_0000003") == []


def test_no_tracker_where_nothing_is_complete(tmp_path: Path) -> None:
    claimed(tmp_path)
    distributed(tmp_path / "iter_0000003")
    (tmp_path / "iter_0000003/common.pt").unlink()
    tracked(tmp_path, 3)
    assert folders.set_aside(tmp_path, RUN) == [tmp_path / "iter_0000003.incomplete"]
    lineage.settle(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000003.incomplete"]


def test_retention_spares_what_the_tracker_names(tmp_path: Path) -> None:
    """An emptied or edited tracker may name an older one, which is then what gets loaded."""
    claimed(tmp_path)
    for iteration in (3, 6):
        distributed(folders.folder(tmp_path, iteration))
    tracked(tmp_path, "")
    assert folders.prune(tmp_path, 1, RUN) == [tmp_path / "iter_0000003"]
    distributed(folders.folder(tmp_path, 3))
    tracked(tmp_path, 3)
    assert folders.prune(tmp_path, 1, RUN) == []
    (tmp_path / "iter_0000006").rename(tmp_path / "iter_0000006.ready")  # killed in its publishing
    assert folders.prune(tmp_path, 1, RUN) == []
    with pytest.raises(ValueError, match="at least 1"):
        folders.prune(tmp_path, 0, RUN)


@settings(deadline=None)
@given(
    complete=st.sets(st.integers(1, 9), min_size=1), cut=st.sets(st.integers(1, 9)), keep=st.data()
)
def test_retention_keeps_the_newest(complete: set[int], cut: set[int], keep: st.DataObject) -> None:
    number = keep.draw(st.integers(1, 10))
    with tempfile.TemporaryDirectory() as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickles, "look", look_here)
        root = Path(temporary)
        claimed(root)
        for iteration in complete | cut:
            distributed(folders.folder(root, iteration))
        for iteration in cut - complete:
            (folders.folder(root, iteration) / "common.pt").unlink()
        tracked(root, max(complete | cut))
        folders.prune(root, number, RUN)
        left = {each.iteration for each in [*folders.newest_first(root)][::-1] if not each.problem}
        assert left == set(sorted(complete)[-number:])
        assert set(problems(root)) >= {folders.folder(root, n).name for n in cut - complete}
