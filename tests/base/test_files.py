"""Files are written whole, and nothing is removed that we can't prove we made."""

from __future__ import annotations

import errno
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from launcher.base import files, owned
from launcher.base.files import ForeignFileError
from launcher.base.settings import ROOT
from launcher.base.trust import require_own_links, require_trusted

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that a user named, with something of the user's beside what is ours."""
    (tmp_path / "letter").write_text("mine")
    return tmp_path


def ours(path: Path) -> Path:
    """A folder of ours with files, a folder and links in it, one of them to a user's file."""
    owned.make_folder(path)
    (path / "deep/er").mkdir(parents=True)
    (path / "deep/er/file").write_text("x")
    (path / "link").symlink_to(path.parent / "letter")
    (path / "deep/folder").symlink_to(path.parent)
    return path


def test_a_folder_of_ours_goes_and_no_link_in_it_is_followed(root: Path) -> None:
    owned.remove_folder(ours(root / "made"), root)
    assert os.listdir(root) == ["letter"]


def test_a_folder_without_our_marker_stays(root: Path) -> None:
    (root / "theirs").mkdir()
    (root / "theirs/data").write_text("x")
    with pytest.raises(ForeignFileError, match=r"there is no \.megatron-launchpad in it"):
        owned.remove_folder(root / "theirs", root)
    (root / "theirs" / owned.MARKER).write_text("mine")  # of another content
    with pytest.raises(ForeignFileError):
        owned.remove_folder(root / "theirs", root)
    assert (root / "theirs/data").exists()


@pytest.mark.parametrize("path", ["", ".", "made", "/", "/..", "{root}", "{root}/../{name}/made"])
def test_a_path_that_is_none_of_ours_is_refused(
    root: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Path("") is the current folder: a text that was read empty removed all of it."""
    ours(root / "made")
    monkeypatch.chdir(root)
    with pytest.raises(ForeignFileError):
        owned.remove_folder(Path(path.format(root=root, name=root.name)), root)
    assert (root / "made/deep/er/file").exists()
    assert (root / "letter").exists()


def test_the_folder_that_one_works_or_lives_in_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ours(root / "made")
    monkeypatch.chdir(made / "deep")
    with pytest.raises(ForeignFileError, match="lies in, it"):
        owned.remove_folder(made, root)
    monkeypatch.chdir(root)
    monkeypatch.setenv("HOME", str(made / "deep/er"))
    with pytest.raises(ForeignFileError, match="lies in, it"):
        owned.remove_folder(made, root)
    monkeypatch.setenv("HOME", str(made))
    with pytest.raises(ForeignFileError):
        owned.remove_folder(made, root)
    assert (made / "deep/er/file").exists()


def test_what_a_link_leads_to_stays(root: Path) -> None:
    """A link in the place of a folder of ours, or on the way to it."""
    made = ours(root / "made")
    (root / "link").symlink_to(made)
    (root / "way").symlink_to(root)
    for path in (root / "link", root / "way/made"):
        with pytest.raises(ForeignFileError, match="link"):
            owned.remove_folder(path, root)
    with pytest.raises(ForeignFileError, match="link"):
        owned.remove_file(root / "way/letter", root)
    assert (made / "deep/er/file").exists()
    owned.remove_folder(root / "way/made", root / "way")  # the user's own link to a disk
    assert not made.exists()


@needs_root
def test_what_is_mounted_in_it_stays(root: Path) -> None:
    made = ours(root / "made")
    (root / "disk").mkdir()
    (root / "disk/photo").write_text("x")
    program = f"""if True:
        from pathlib import Path
        from launcher.base import files, owned
        try:
            owned.remove_folder(Path({str(made)!r}), Path({str(root)!r}))
        except files.ForeignFileError as error:
            print(error.strerror)
    """
    mount = f'mkdir {made}/inner && mount --bind {root}/disk {made}/inner && exec $0 -c "$1"'
    argv = ["unshare", "--mount", "sh", "-c", mount, sys.executable, program]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert f"something is mounted at {made}/inner" in done.stdout, done.stderr
    assert (root / "disk/photo").exists()


def test_what_a_cut_removal_left_goes_with_the_next(root: Path) -> None:
    made, left = ours(root / "made"), root / f".made.{'0' * 16}.removed"
    made.rename(left)
    foreign = root / f".made.{'1' * 16}.removed"
    foreign.mkdir()
    (foreign / "thesis").touch()
    owned.remove_folder(ours(root / "made"), root)
    assert sorted(os.listdir(root)) == [foreign.name, "letter"]
    assert (foreign / "thesis").exists()


def test_a_file_is_removed_and_nothing_else(root: Path) -> None:
    (root / "folder").mkdir()
    (root / "link").symlink_to("letter")
    owned.remove_file(root / "link", root)
    assert (root / "letter").exists()
    with pytest.raises(ForeignFileError, match="it isn't a file"):
        owned.remove_file(root / "folder", root)
    with pytest.raises(FileNotFoundError):
        owned.remove_file(root / "link", root)
    owned.remove_file(root / "link", root, missing_ok=True)
    owned.remove_file(root / "letter", root)


def test_what_is_written_takes_the_place_of_a_link(root: Path) -> None:
    """A link in the place of what is written had its target overwritten."""
    (root / "state").symlink_to("letter")
    files.write(root / "state", "new")
    assert (root / "letter").read_text() == "mine"
    assert not (root / "state").is_symlink()
    assert (root / "state").read_text() == "new"
    assert sorted(os.listdir(root)) == ["letter", "state"]


def test_what_a_killed_process_left_aside_goes_and_what_is_written_stays(root: Path) -> None:
    left = files.aside_path(root / "letter", "0" * 16)
    left.write_text("half")
    strange = root / ".letter.0123.aside"
    strange.write_text("of somebody")
    with files.PendingFile(root / "letter") as other:
        assert files.sweep(root / "letter")
        assert other.path.exists()
    assert not files.sweep(root / "letter")
    assert sorted(os.listdir(root)) == [".letter.0123.aside", "letter"]


def test_scratch_that_a_killed_process_left_goes_with_the_next(root: Path) -> None:
    """A killed build left a folder in /tmp each time, without a name of ours."""
    code = f"""
import os, signal, sys
from pathlib import Path
from launcher.base import files, owned
with owned.scratch(Path({str(root)!r})) as folder:
    (folder / "large").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False)
    [left] = root.glob("scratch-*/large")
    with owned.scratch(root) as first, owned.scratch(root) as second:
        assert {*root.glob("scratch-*")} == {first, second}
    assert not left.exists()


def test_only_folders_of_the_dead_are_swept(root: Path) -> None:
    """A model's folder that a killed command left stayed for ever."""
    token = "0" * 16
    dead = files.aside_path(root / "model", token)
    ours(dead)
    ours(files.aside_path(dead, token).with_suffix(f"{files.ASIDE}.{token}{owned.REMOVED}"))
    theirs = {".model.0123.aside", f".their.{token}.aside", f".new.{token}.aside"}
    for name in theirs:
        (root / name).mkdir()
        (root / name / "data").write_text("of somebody")
    (root / f".their.{token}.aside" / owned.MARKER).write_text("of somebody")
    (root / f".link.{token}.aside").symlink_to(root)
    elsewhere = ours(files.aside_path(root / "elsewhere", token))
    (elsewhere / owned.MARKER).write_bytes(owned.MADE + b"another kernel")
    begun = files.aside_path(root / "begun", token)
    begun.mkdir()
    with owned.locked_folder(files.aside_path(root / "model", "1" * 16)) as living:
        owned.sweep_folders(root)
        stay = {"letter", f".link.{token}.aside", elsewhere.name, begun.name, *theirs}
        assert {*os.listdir(root)} == {living.name, *stay}
    os.utime(begun, (0, 0))
    for each in (*elsewhere.rglob("*"), elsewhere):
        os.utime(each, (0, 0), follow_symlinks=False)
    owned.sweep_folders(root)
    assert {*os.listdir(root)} == stay - {elsewhere.name, begun.name}


@pytest.mark.parametrize("kind", ["symlink", "hard link", "pipe", "folder", "device"])
def test_what_is_no_file_of_ours_is_not_opened(root: Path, kind: str) -> None:
    """A log or a lock was written through a link, and a pipe was waited for."""
    path = root / "log"
    {
        "symlink": lambda: path.symlink_to("letter"),
        "hard link": lambda: path.hardlink_to(root / "letter"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
        "device": lambda: path.symlink_to("/dev/zero"),
    }[kind]()
    with pytest.raises((ForeignFileError, IsADirectoryError)):
        files.open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    assert (root / "letter").read_text() == "mine"


def test_folders_are_made_and_no_link_among_them(root: Path) -> None:
    assert owned.real_folder(root / "a/b", root).is_dir()
    (root / "a/c").symlink_to(root)
    with pytest.raises(ForeignFileError):
        owned.real_folder(root / "a/c/d", root)
    with pytest.raises(ForeignFileError):
        owned.real_folder(root / "letter/d", root)
    assert sorted(os.listdir(root)) == ["a", "letter"]


def test_a_folder_of_ours_is_made_where_there_is_nothing(root: Path) -> None:
    (root / "theirs").mkdir()
    with pytest.raises(FileExistsError):
        owned.make_folder(root / "theirs")
    assert not owned.is_ours(root / "theirs")
    assert owned.is_ours(owned.make_folder(root / "made"))
    assert sorted(os.listdir(root)) == ["letter", "made", "theirs"]


ACL = "system.posix_acl_access"


def _let_in(folder: Path, user: int = 4711) -> None:
    """As `setfacl -m u:4711:rwx` does: the owner, the user, the group, the mask, all others."""
    entries = ((0x01, 7, -1), (0x02, 7, user), (0x04, 5, -1), (0x10, 7, -1), (0x20, 5, -1))
    packed = b"".join(struct.pack("<HHi", *entry) for entry in entries)
    os.setxattr(folder, ACL, struct.pack("<I", 2) + packed)


@needs_root
@pytest.mark.parametrize("above", [False, True])
def test_a_folder_that_another_user_has_or_can_write_is_not_trusted(
    root: Path, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = root / "shared/cache"
    cache.mkdir(parents=True)
    require_trusted(cache)
    require_trusted(root / "not/there/yet")
    changed = cache.parent if above else cache
    for change, back in (
        (lambda: os.chown(changed, 4711, 0), lambda: os.chown(changed, 0, 0)),
        (lambda: changed.chmod(0o777), lambda: changed.chmod(0o755)),
        (
            lambda: (os.chown(changed, 0, 4711), changed.chmod(0o775)),
            lambda: (os.chown(changed, 0, 0), changed.chmod(0o755)),
        ),
        (lambda: _let_in(changed), lambda: os.removexattr(changed, ACL)),
    ):
        change()
        with pytest.raises(ForeignFileError) as caught:
            require_trusted(cache)
        assert caught.value.filename == str(changed)
        monkeypatch.setenv("LAUNCHER_TRUSTED", f"/nowhere:{changed}")
        require_trusted(cache)
        monkeypatch.delenv("LAUNCHER_TRUSTED")
        back()
    os.chown(changed, 4711, 0)
    monkeypatch.setenv("SUDO_UID", "4711")
    require_trusted(cache)


@needs_root
def test_a_link_to_a_folder_of_another_user_is_not_trusted(root: Path) -> None:
    (root / "theirs").mkdir()
    os.chown(root / "theirs", 4711, 4711)
    (root / "link").symlink_to("theirs")
    with pytest.raises(ForeignFileError, match="belongs to user id 4711"):
        require_trusted(root / "link/cache")
    (root / "theirs").rmdir()
    (root / "theirs").mkdir()
    os.lchown(root / "link", 4711, 4711)
    with pytest.raises(ForeignFileError):
        require_trusted(root / "link/cache")


@needs_root
@pytest.mark.parametrize("last", ["relative", "absolute", "up"])
def test_each_link_of_a_chain_is_looked_at(
    root: Path, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    """Its two ends were looked at, and another user's link in the middle led elsewhere."""
    for name in ("first", "middle", "end"):
        (root / name).mkdir()
    target = {"relative": "../end", "absolute": str(root / "end"), "up": "../first/../end"}[last]
    (root / "middle/theirs").symlink_to(target)
    (root / "first/link").symlink_to(root / "middle/theirs")
    require_trusted(root / "first/link/cache")
    require_own_links(root / "first/link/cache")
    os.lchown(root / "middle/theirs", 4711, 4711)
    for look in (require_trusted, require_own_links):
        with pytest.raises(ForeignFileError, match="belongs to user id 4711") as caught:
            look(root / "first/link/cache")
        assert caught.value.filename == str(root / "middle/theirs")
        monkeypatch.setenv("LAUNCHER_TRUSTED", str(root / "middle"))
        look(root / "first/link/cache")
        monkeypatch.delenv("LAUNCHER_TRUSTED")
    os.lchown(root / "middle/theirs", 0, 0)
    os.chown(root / "end", 4711, 4711)  # whose folder it is, root may save to
    require_own_links(root / "first/link/cache")


def test_links_in_a_circle_are_an_error_of_the_system(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels"):
        require_trusted(root / "a/x")


def test_where_each_removes_their_own_may_lead_there(root: Path) -> None:
    (root / "tmp").mkdir()
    (root / "tmp").chmod(0o1777)
    (root / "tmp/mine").mkdir()
    require_trusted(root / "tmp/mine")
    with pytest.raises(ForeignFileError, match="by everybody"):
        require_trusted(root / "tmp")


@pytest.mark.parametrize("at", ["mkdir", "mark", "rename"])
def test_a_full_disk_at_the_first_moment_leaves_no_folder(
    root: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """One stayed whose marker was empty, so that nothing might ever remove it."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    place = {"mkdir": (os, "mkdir"), "mark": (os, "write"), "rename": (owned, "rename")}[at]
    before = sorted(root.rglob("*"))
    monkeypatch.setattr(*place, Mock(side_effect=full))
    with pytest.raises(OSError, match="No space left") as caught:
        owned.make_folder(root / "new")
    assert sorted(root.rglob("*")) == before
    if at == "mark":
        assert str(caught.value.filename).endswith(owned.MARKER)


def test_a_full_disk_is_named_by_what_was_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """People were told "No space left on device" and not where."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    before = sorted(root.rglob("*"))
    with pytest.raises(OSError, match=re.escape(str(root / "new"))):
        files.write(root / "new", "content")
    assert sorted(root.rglob("*")) == before
