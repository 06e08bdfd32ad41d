"""Old checkpoints are removed when the tracker changes, and at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.train.checkpoints import folders, retention

from .test_folders import RUN, claimed, distributed


def save(root: Path, iteration: int) -> None:
    distributed(folders.partial(root, iteration))
    folders.publish(root, iteration)


def test_it_looks_again_when_the_tracker_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claimed(tmp_path)
    said: list[str] = []
    kept = retention.Retention(tmp_path, RUN, 1, said.append)
    kept.look()
    for iteration in (1, 2, 3):
        save(tmp_path, iteration)
    kept.look()
    assert said == ["removed checkpoints iter_0000001, iter_0000002"]
    monkeypatch.setattr(folders, "prune", lambda *_: pytest.fail("it has not changed"))
    kept.look()


def test_the_last_look_is_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "POLL_SECONDS", 3600.0)
    claimed(tmp_path)
    said: list[str] = []
    with retention.Retention(tmp_path, RUN, 1, said.append):
        save(tmp_path, 1)
        save(tmp_path, 2)
    assert said == ["removed checkpoints iter_0000001"]
    assert [each.iteration for each in folders.scan(tmp_path)] == [2]


def test_what_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(root: Path, keep: int, line: str) -> list[Path]:
        raise PermissionError(13, os.strerror(13), str(root))

    monkeypatch.setattr(folders, "prune", refuse)
    save(tmp_path, 1)
    said: list[str] = []
    retention.Retention(tmp_path, RUN, 1, said.append).look()
    assert said == [f"checkpoints in {tmp_path} can't be signed or removed: Permission denied"]
