"""Who called, and what is made for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.follow import files
from launcher.follow.files import Caller
from launcher.train.checkpoints import folders

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, as sudo gives it")


@pytest.fixture
def sudo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables as sudo sets them."""
    monkeypatch.setenv("SUDO_UID", "12345")
    monkeypatch.setenv("SUDO_GID", "23456")


@needs_root
@pytest.mark.usefixtures("sudo")
def test_under_sudo_it_is_the_user_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the run wrote, and the folders made for it, were root's."""
    assert files.caller() == Caller(12345, 23456)
    (tmp_path / "old").mkdir()
    files.make_folder(tmp_path / "old/new/er")
    owners = [(tmp_path / name).stat().st_uid for name in ("old", "old/new", "old/new/er")]
    assert owners == [os.getuid(), 12345, 12345]
    for gid in ("nonsense", "0"):
        monkeypatch.setenv("SUDO_UID", "0")
        monkeypatch.setenv("SUDO_GID", gid)
        assert files.caller() == Caller(0, 0)
    monkeypatch.setattr("os.getuid", lambda: 1000)
    monkeypatch.setattr("os.getgid", lambda: 100)
    monkeypatch.setattr("os.getgroups", lambda: [110, 100, 44])
    assert files.caller() == Caller(1000, 100, (44, 110))


@needs_root
def test_the_tracker_stays_whose_the_folder_is(tmp_path: Path) -> None:
    """Where root's launcher had set one aside, the caller's run could write it no more."""
    os.chown(tmp_path, 12345, 23456)
    folders.partial(tmp_path, 3).mkdir()
    folders.publish(tmp_path, 3)
    told = (tmp_path / folders.TRACKER).stat()
    assert (told.st_uid, told.st_gid) == (12345, 23456)
