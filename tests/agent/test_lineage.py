"""What is another run's is neither loaded as one's own, nor moved, removed or overwritten.

And old checkpoints of one's own are removed when the tracker changes, and at the end.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.agent.checkpoints import folders, lineage, retention
from launcher.agent.checkpoints.lineage import SaveRequest

from .test_folders import distributed, tracked

A, B, C = "aaaaaaaa", "bbbbbbbb", "cccccccc"


def cut(root: Path, iteration: int) -> None:
    """A save that was interrupted."""
    distributed(folders.folder(root, iteration))
    (folders.folder(root, iteration) / "common.pt").unlink()


def saved(root: Path, run: str, *iterations: int, on: bool = False) -> str:
    """What a run leaves that saved at these iterations; its line."""
    line = folders.lineage_of(root, run, on=on)
    lineage.claim(root, run, line)
    for iteration in iterations:
        distributed(folders.partial(root, iteration))
        folders.publish(root, iteration)
    lineage.settle(root)
    return line


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("over", [False, True])
def test_a_wish_is_told_in_one_variable(on: bool, over: bool) -> None:
    request = SaveRequest(A, "/my folder", on, over)
    assert lineage.save_request({lineage.VARIABLE: str(request)}) == request
    assert lineage.save_request({lineage.VARIABLE: "nonsense"}) is None


def test_another_runs_checkpoints_are_met_unless_they_are_gone_on_from(tmp_path: Path) -> None:
    """B saved among A's without a word, and took A's newest for its own."""
    saved(tmp_path, A, 3, 6)
    assert lineage.owner(tmp_path / "iter_0000003") == A
    assert names(tmp_path) == ["iter_0000003", "iter_0000006", folders.TRACKER]
    assert folders.lineage_of(tmp_path, B, on=False) == B
    assert folders.refusal(tmp_path, B, on=False) == (
        f"{tmp_path} holds checkpoints that aren't this run's: iter_0000006 is run {A}'s"
    )
    assert folders.newest_complete(tmp_path, B) is None
    line = folders.lineage_of(tmp_path, B, on=True)
    assert (line, folders.refusal(tmp_path, line, on=True)) == (A, "")
    assert saved(tmp_path, B, 9, on=True) == A
    assert folders.prune(tmp_path, 1, A) == [tmp_path / "iter_0000003", tmp_path / "iter_0000006"]
    assert lineage.of_run(tmp_path, B) == A


def test_what_plain_megatron_saved_is_never_touched(tmp_path: Path) -> None:
    """It says nothing of whose it is: B goes on from it, prunes its own, and leaves the rest."""
    for iteration in (3, 6):
        distributed(folders.folder(tmp_path, iteration))
    tracked(tmp_path, 6)
    assert "not known to be this run's" in folders.refusal(tmp_path, B, on=False)
    assert folders.refusal(tmp_path, B, on=True) == ""
    assert saved(tmp_path, B, 9, 12, on=True) == B
    cut(tmp_path, 15)
    tracked(tmp_path, 15)
    assert folders.set_aside(tmp_path, B) == []
    assert folders.prune(tmp_path, 1, B) == [tmp_path / "iter_0000009"]
    assert [each.iteration for each in [*folders.newest_first(tmp_path)][::-1]] == [3, 6, 12, 15]
    assert folders.refusal(tmp_path, B, on=True) == (
        f"{tmp_path}/iter_0000015 is newer than what the run goes on from, and is "
        "not known to be this run's"
    )


def test_a_killed_runs_claim_tells_what_it_left(tmp_path: Path) -> None:
    """Upstream's programs write a folder under its own name, and the runner may be killed."""
    cut(tmp_path, 3)
    lineage.claim(tmp_path, A, A)
    cut(tmp_path, 6)
    assert [lineage.owner(folders.folder(tmp_path, n)) for n in (3, 6)] == ["", A]
    assert folders.set_aside(tmp_path, A) == [tmp_path / "iter_0000006.incomplete"]
    cut(tmp_path, 9)
    lineage.claim(tmp_path, A, A)  # it is started again
    assert lineage.owner(tmp_path / "iter_0000009") == A
    lineage.claim(tmp_path, B, B)
    assert [lineage.owner(folders.folder(tmp_path, n)) for n in (3, 9)] == ["", A]
    assert not lineage.is_claimed(tmp_path / "iter_0000009")


def test_setting_aside_restores_what_the_tracker_named_of_others(tmp_path: Path) -> None:
    saved(tmp_path, A, 3)
    lineage.claim(tmp_path, B, B, overwrite=True)
    cut(tmp_path, 6)
    tracked(tmp_path, 6)
    assert folders.set_aside(tmp_path, B) == [tmp_path / "iter_0000006.incomplete"]
    assert folders.noted(tmp_path) == "3"
    cut(tmp_path, 9)
    assert folders.set_aside(tmp_path, C) == []
    assert folders.noted(tmp_path) == "3"


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_equal_iteration_of_another_run_is_replaced_where_that_is_said(
    tmp_path: Path, overwrite: bool
) -> None:
    saved(tmp_path, A, 3)
    lineage.claim(tmp_path, B, B, overwrite=overwrite)
    distributed(folders.partial(tmp_path, 3))
    if overwrite:
        assert lineage.owner(folders.publish(tmp_path, 3)) == B
        return
    with pytest.raises(FileExistsError, match="iter_0000003 is there, of another run"):
        folders.publish(tmp_path, 3)
    assert lineage.owner(tmp_path / "iter_0000003") == A


def test_without_a_claim_nothing_is_replaced_or_removed(tmp_path: Path) -> None:
    """A program that was started without a runner proves nothing; killed in a save, it goes on."""
    for at in (folders.folder(tmp_path, 3), folders.partial(tmp_path, 3)):
        distributed(at)
    folders.remove_partial(tmp_path)
    assert names(tmp_path) == ["iter_0000003", "iter_0000003.partial"]
    folders.make_room(folders.partial(tmp_path, 3))
    distributed(folders.partial(tmp_path, 3))
    folders.publish(tmp_path, 3)
    aside = ["iter_0000003.incomplete", "iter_0000003.incomplete.2"]
    assert names(tmp_path) == ["iter_0000003", *aside, folders.TRACKER]


def test_others_partial_and_removed_ones_stay(tmp_path: Path) -> None:
    saved(tmp_path, A, 3)
    (tmp_path / "iter_0000003").rename(tmp_path / ".iter_0000003.0123456789abcdef.removed")
    distributed(tmp_path / ".iter_0000006.0123456789abcdef.removed")
    distributed(folders.partial(tmp_path, 9))
    lineage.claim(tmp_path, B, B)
    distributed(folders.partial(tmp_path, 12))
    folders.remove_partial(tmp_path)
    assert folders.prune(tmp_path, 1, B) == []
    left = [
        ".iter_0000003.0123456789abcdef.removed",
        ".iter_0000006.0123456789abcdef.removed",
        "iter_0000009.partial",
    ]
    assert names(tmp_path) == [*left, folders.TRACKER, lineage.NOTE]


def test_an_older_one_that_was_said_to_be_ours_by_a_link_is_not(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    saved(tmp_path / "elsewhere", A, 3)
    lineage.claim(tmp_path, A, A)
    (tmp_path / "iter_0000003").symlink_to(tmp_path / "elsewhere/iter_0000003")
    assert lineage.owner(tmp_path / "iter_0000003") == ""


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", '{"run": 3}', '{"run": "x y", "line": "x", "before": []}', "[" * 99999, None],
)
def test_a_note_that_cannot_be_read_says_nothing(tmp_path: Path, content: str | None) -> None:
    """None is a pipe, which is not waited for."""
    distributed(tmp_path / "iter_0000003")
    note = tmp_path / "iter_0000003" / lineage.NOTE
    os.mkfifo(note) if content is None else note.write_text(content)
    lineage.claim(tmp_path, A, A)
    assert lineage.owner(tmp_path / "iter_0000003") == ""


def test_upstreams_checkpoints_are_signed_when_the_tracker_names_them(tmp_path: Path) -> None:
    """Not before: Megatron refuses to write into a folder with something in it."""
    distributed(folders.folder(tmp_path, 3))
    tracked(tmp_path, 3)
    lineage.claim(tmp_path, A, A)
    watch = retention.Retention(tmp_path, A, None, pytest.fail)
    distributed(folders.folder(tmp_path, 6))
    watch.look()
    assert not (tmp_path / "iter_0000006" / lineage.NOTE).exists()
    tracked(tmp_path, 6)
    watch.look()
    assert lineage.said(tmp_path / "iter_0000006") == A
    assert lineage.said(tmp_path / "iter_0000003") == ""


def test_it_looks_when_the_tracker_has_changed_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "POLL_SECONDS", 3600.0)
    lineage.claim(tmp_path, A, A)
    said: list[str] = []
    with retention.Retention(tmp_path, A, 1, said.append) as kept:
        saved(tmp_path, A, 1, 2, 3)
        kept.look()
        assert said == ["removed checkpoints iter_0000001, iter_0000002"]
        with monkeypatch.context() as patched:
            patched.setattr(folders, "prune", lambda *_: pytest.fail("it has not changed"))
            kept.look()
        saved(tmp_path, A, 4)
    assert said[1:] == ["removed checkpoints iter_0000003"]
    assert [each.iteration for each in [*folders.newest_first(tmp_path)][::-1]] == [4]


def test_a_save_that_finds_the_disk_full_lets_old_ones_go(tmp_path: Path) -> None:
    """A killed runner, or a larger `keep`, left too many: no save ended, so they stayed."""
    saved(tmp_path, A, 1, 2, 3)
    said: list[str] = []
    kept = retention.Retention(tmp_path, A, 1, said.append)
    kept.look()
    assert not said
    folders.partial(tmp_path, 4).mkdir()
    kept.look()
    assert said == ["removed checkpoints iter_0000001, iter_0000002"]
    assert kept.seen[1] == {"iter_0000003", "iter_0000004.partial"}


def test_what_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=PermissionError(13, os.strerror(13), str(tmp_path)))
    monkeypatch.setattr(folders, "prune", refuse)
    said: list[str] = []
    kept = retention.Retention(tmp_path, A, 1, said.append)
    saved(tmp_path, A, 1)
    kept.look()
    assert said == [f"checkpoints in {tmp_path} can't be signed or removed: Permission denied"]
