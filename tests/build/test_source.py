"""Megatron sources: which release a checkout is, what identifies it, what is refused."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.build import source
from launcher.errors import BuildError, UsageError
from launcher.matrix.load import load_matrix
from launcher.matrix.schema import LockedGit, LockedRelease

from .conftest import INFO, commit_all


def locked(commit: str, tree: str) -> LockedRelease:
    return LockedRelease(git=LockedGit(commit=commit, tree=tree, epoch=1700000000))


ANY = locked("a" * 40, "b" * 40)


def test_a_checkout_is_the_release_its_package_info_names(checkout: Path) -> None:
    assert source.release_of(checkout, load_matrix(), None, "0.16.1") == "0.9.0"


def test_a_later_patch_level_is_treated_as_its_minor_release(checkout: Path) -> None:
    (checkout / "megatron/core/package_info.py").write_text(INFO.format(minor=12, patch=9))
    assert source.release_of(checkout, load_matrix(), None, "0.9.0") == "0.12.3"


def test_another_release_than_the_one_asked_for_is_refused(checkout: Path) -> None:
    with pytest.raises(UsageError, match=r"is Megatron 0\.9\.0, and 0\.12\.3 was asked for"):
        source.release_of(checkout, load_matrix(), "0.12.3", "0.9.0")


def test_a_minor_release_outside_the_matrix_names_those_inside(checkout: Path) -> None:
    (checkout / "megatron/core/package_info.py").write_text(INFO.format(minor=7, patch=0))
    with pytest.raises(UsageError, match=r"0\.7\.0, which the matrix doesn't have"):
        source.release_of(checkout, load_matrix(), None, "0.9.0")
    assert source.release_of(checkout, load_matrix(), "0.9.0", "0.9.0") == "0.9.0"


def test_a_folder_that_is_not_megatron_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="isn't a Megatron-LM source"):
        source.release_of(tmp_path, load_matrix(), None, "0.9.0")


def test_the_identity_changes_with_content_name_and_mode_and_not_with_time(checkout: Path) -> None:
    def identity() -> str:
        return source.from_path(checkout, "0.9.0", ANY).identity

    seen = [identity()]
    (checkout / "setup.py").touch()
    assert identity() == seen[0]
    (checkout / "setup.py").write_text("print('edited')\n")
    seen.append(identity())
    (checkout / "setup.py").chmod(0o755)
    seen.append(identity())
    (checkout / "setup.py").rename(checkout / "other.py")
    seen.append(identity())
    assert len(set(seen)) == 4


def test_a_checkout_is_taken_as_it_stands_less_what_git_ignores(
    checkout: Path, tmp_path: Path
) -> None:
    (checkout / ".gitignore").write_text("*.log\n")
    commit_all(checkout)
    (checkout / "noise.log").write_text("x")
    (checkout / "new.py").write_text("x = 1\n")
    found = source.from_path(checkout, "0.9.0", ANY)
    assert found.revision.endswith("+edited")
    found.unpack(tmp_path / "tree")
    assert (tmp_path / "tree/new.py").is_file()
    assert not (tmp_path / "tree/noise.log").exists()
    assert not (tmp_path / "tree/.git").exists()


def test_a_repository_within_a_checkout_is_left_out(checkout: Path, tmp_path: Path) -> None:
    commit_all(checkout)
    before = source.from_path(checkout, "0.9.0", ANY).identity
    (checkout / "other").mkdir()
    (checkout / "other/file").write_text("x")
    commit_all(checkout / "other")
    found = source.from_path(checkout, "0.9.0", ANY)
    assert found.identity == before
    found.unpack(tmp_path / "tree")
    assert not (tmp_path / "tree/other").exists()


def test_within_a_hook_of_git_the_checkout_is_the_one_named(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_all(checkout)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert source.from_path(checkout, "0.9.0", ANY).revision == commit


def test_what_tar_cannot_unpack_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    with pytest.raises(BuildError, match=r"tar can't unpack the source there: \S"):
        source._extract(tmp_path / "a.tar.gz", tmp_path)


def test_a_bare_repository_gives_the_locked_commit(checkout: Path, tmp_path: Path) -> None:
    commit = commit_all(checkout)
    bare = tmp_path / "bare.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(checkout), str(bare)], check=True)
    tree = source.git(bare, "rev-parse", f"{commit}^{{tree}}").strip()
    found = source.from_path(bare, "0.9.0", locked(commit, tree))
    assert (found.kind, found.revision, found.whole) == ("git", commit, True)
    found.unpack(tmp_path / "tree")
    assert (tmp_path / "tree/setup.py").read_text() == "print('setup')\n"
    with pytest.raises(BuildError) as caught:
        source.from_path(bare, "0.9.0", locked(commit, "c" * 40))
    assert "c" * 40 in str(caught.value)
    assert tree in str(caught.value)


def test_a_bare_repository_without_the_commit_is_refused(checkout: Path, tmp_path: Path) -> None:
    commit_all(checkout)
    bare = tmp_path / "bare.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(checkout), str(bare)], check=True)
    with pytest.raises(UsageError, match="without the commit"):
        source.from_path(bare, "0.9.0", ANY)


def test_git_fetches_one_commit_and_a_missing_one_says_how_else(
    checkout: Path, empty_site: source.Settings
) -> None:
    commit = commit_all(checkout)
    subprocess.run(
        ["git", "-C", str(checkout), "config", "uploadpack.allowAnySHA1InWant", "true"], check=True
    )
    folder = source.repository(checkout.as_uri(), commit, empty_site)
    assert source.git(folder, "cat-file", "-t", commit).strip() == "commit"
    with pytest.raises(BuildError, match="SOURCE=path"):
        source.repository(checkout.as_uri(), "d" * 40, empty_site)


def test_launchers_fetch_in_turn_and_the_lock_of_a_killed_one_does_not_last(
    checkout: Path, empty_site: source.Settings
) -> None:
    commits = [commit_all(checkout)]
    for number in range(3):
        (checkout / "setup.py").write_text(f"print({number})\n")
        commits.append(commit_all(checkout))
    subprocess.run(
        ["git", "-C", str(checkout), "config", "uploadpack.allowAnySHA1InWant", "true"], check=True
    )
    folder = source.repository(checkout.as_uri(), commits[0], empty_site)
    (folder / "shallow.lock").touch()
    with ThreadPoolExecutor() as pool:
        found = list(
            pool.map(lambda c: source.repository(checkout.as_uri(), c, empty_site), commits)
        )
    assert all(source.git(f, "cat-file", "-t", c) for f, c in zip(found, commits, strict=True))


def test_a_mirror_takes_the_place_of_github(checkout: Path, empty_site: source.Settings) -> None:
    commit = commit_all(checkout)
    subprocess.run(
        ["git", "-C", str(checkout), "config", "uploadpack.allowAnySHA1InWant", "true"], check=True
    )
    site = replace(empty_site, git_mirror=checkout.parent.as_uri() + "/")
    folder = source.repository("https://github.com/Megatron-LM", commit, site)
    assert source.git(folder, "cat-file", "-t", commit).strip() == "commit"
