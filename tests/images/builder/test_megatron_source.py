"""Megatron sources: which release a checkout is, what identifies it, what is refused."""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from pydantic import ValidationError

from launcher.base.errors import BuildError, UsageError
from launcher.images.matrix.locked import LockedGit, LockedRelease
from launcher.images.matrix.matrix_file import load_matrix
from launcher.images.matrix.schema import GitSource, Interpreter, MegatronRelease
from launcher.images.sources import fetch, megatron_source

from .conftest import INFO, commit_all


def locked(commit: str, tree: str) -> LockedRelease:
    return LockedRelease(git=LockedGit(commit=commit, tree=tree, epoch=1700000000))


ANY = locked("a" * 40, "b" * 40)


@pytest.mark.parametrize(
    ("minor", "patch", "asked", "release"),
    [(9, 0, None, "0.9.0"), (12, 9, None, "0.12.3"), (7, 0, "0.9.0", "0.9.0")],
)
def test_a_checkout_is_the_release_that_it_names_or_the_nearest_or_the_one_asked_for(
    checkout: Path, minor: int, patch: int, asked: str | None, release: str
) -> None:
    info = INFO.format(minor=minor, patch=patch)
    (checkout / "megatron/core/package_info.py").write_text(info)
    assert megatron_source.release_of(checkout, load_matrix(), asked, "0.16.1") == release


@pytest.mark.parametrize(
    ("minor", "asked", "said"),
    [
        (9, "0.12.3", r"is Megatron 0\.9\.0, and 0\.12\.3 was asked for"),
        (7, None, r"0\.7\.0, which the matrix doesn't have"),
        (None, None, "isn't a Megatron-LM source"),
    ],
)
def test_a_checkout_of_no_release_or_another_is_refused(
    checkout: Path, minor: int | None, asked: str | None, said: str
) -> None:
    info = checkout / "megatron/core/package_info.py"
    if minor is None:
        info.unlink()
    else:
        info.write_text(INFO.format(minor=minor, patch=0))
    with pytest.raises(UsageError, match=said):
        megatron_source.release_of(checkout, load_matrix(), asked, "0.9.0")
    info.write_text(INFO.format(minor=13, patch=0).replace("''", "'-?'"))
    with pytest.raises(UsageError, match=r"'0\.13\.0-\?' is no version"):
        megatron_source.own_version(checkout)


@pytest.mark.parametrize(
    ("pre_release", "own"), [("", "0.13.0"), ("rc2", "0.13.0rc2"), ("dev", "0.13.0.dev0")]
)
def test_a_checkout_is_what_it_says_and_built_by_the_rules_of_the_nearest(
    checkout: Path, pre_release: str, own: str
) -> None:
    """0.13.0 was written as 0.13.1, the one of its series that the matrix has."""
    info = INFO.format(minor=13, patch=0).replace("''", f"'{pre_release}'")
    (checkout / "megatron/core/package_info.py").write_text(info)
    for asked in (None, "0.13.1", own):  # by its own name, too
        assert megatron_source.release_of(checkout, load_matrix(), asked, "0.9.0") == "0.13.1"
    matrix = load_matrix()
    two = dict.fromkeys(("0.13.0", "0.13.1"), matrix.releases["0.13.1"])
    several = matrix.model_copy(update={"releases": two})  # of those it is its own
    of_two = "0.13.0" if own == "0.13.0" else "0.13.1"
    assert megatron_source.release_of(checkout, several, None, "0.9.0") == of_two
    found = megatron_source.from_path(checkout, "0.13.1", ANY)
    assert (found.release, found.rules) == (own, "0.13.1")
    assert megatron_source.from_path(checkout, own, ANY).rules == ""


def test_the_identity_changes_with_content_name_and_mode_and_not_with_time(checkout: Path) -> None:
    def identity() -> str:
        return megatron_source.from_path(checkout, "0.9.0", ANY).identity

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
    found = megatron_source.from_path(checkout, "0.9.0", ANY)
    assert found.revision.endswith("+edited")
    found.unpack(tmp_path / "tree")
    assert (tmp_path / "tree/new.py").is_file()
    assert not (tmp_path / "tree/noise.log").exists()
    assert not (tmp_path / "tree/.git").exists()


def test_a_checkout_that_was_edited_since_is_refused(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_all(checkout)
    before = megatron_source.from_path(checkout, "0.9.0", ANY).identity
    (checkout / "other").mkdir()
    (checkout / "other/file").write_text("x")
    commit_all(checkout / "other")  # a repository within it is left out
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))  # as within a hook of git
    found = megatron_source.from_path(checkout, "0.9.0", ANY)
    assert (found.identity, found.revision) == (before, f"{commit}+edited")
    (checkout / "link").symlink_to("megatron")
    found = megatron_source.from_path(checkout, "0.9.0", ANY)
    found.unpack(tmp_path / "tree")
    assert (tmp_path / "tree/link").readlink() == Path("megatron")
    assert not (tmp_path / "tree/other").exists()
    (checkout / "setup.py").write_text("print('edited')\n")
    with pytest.raises(BuildError, match="was edited while it was built from"):
        found.unpack(tmp_path / "later")


def test_what_tar_cannot_unpack_is_told_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"no archive")
    refused = pytest.raises(BuildError, match=r"tar can't unpack the source there: \S")
    with (tmp_path / "a.tar.gz").open("rb") as sdist, refused:
        megatron_source.unpack(sdist, tmp_path, "-z")


def test_a_bare_repository_gives_the_locked_commit(checkout: Path, tmp_path: Path) -> None:
    commit = commit_all(checkout)
    bare = tmp_path / "bare.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(checkout), str(bare)], check=True)
    with pytest.raises(UsageError, match="without the commit"):
        megatron_source.from_path(bare, "0.9.0", ANY)
    tree = megatron_source.git(bare, "rev-parse", f"{commit}^{{tree}}").strip()
    found = megatron_source.from_path(bare, "0.9.0", locked(commit, tree))
    assert (found.kind, found.revision, found.whole) == ("git", commit, True)
    found.unpack(tmp_path / "tree")
    assert (tmp_path / "tree/setup.py").read_text() == "print('setup')\n"
    with pytest.raises(BuildError) as caught:
        megatron_source.from_path(bare, "0.9.0", locked(commit, "c" * 40))
    assert "c" * 40 in str(caught.value)
    assert tree in str(caught.value)


def test_git_fetches_one_commit_and_a_missing_one_says_how_else(
    checkout: Path, empty_site: megatron_source.Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = commit_all(checkout)
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")  # a user's kind of hashes doesn't matter
    mirror = replace(empty_site, git_mirror=checkout.parent.as_uri() + "/")
    for url, site in (
        (checkout.as_uri(), empty_site),
        ("https://github.com/Megatron-LM", mirror),
    ):
        folder = megatron_source.repository(url, commit, site)
        assert megatron_source.git(folder, "cat-file", "-t", commit).strip() == "commit"
    with pytest.raises(BuildError, match="SOURCE=path"):
        megatron_source.repository(checkout.as_uri(), "d" * 40, empty_site)


def test_launchers_fetch_in_turn_and_the_lock_of_a_killed_one_does_not_last(
    checkout: Path, empty_site: megatron_source.Settings
) -> None:
    commits = [commit_all(checkout)]
    for number in range(3):
        (checkout / "setup.py").write_text(f"print({number})\n")
        commits.append(commit_all(checkout))
    folder = megatron_source.repository(checkout.as_uri(), commits[0], empty_site)
    (folder / "shallow.lock").touch()
    with ThreadPoolExecutor() as pool:
        found = list(
            pool.map(
                lambda c: megatron_source.repository(checkout.as_uri(), c, empty_site), commits
            )
        )
    assert all(
        megatron_source.git(f, "cat-file", "-t", c) for f, c in zip(found, commits, strict=True)
    )


@pytest.mark.parametrize("lost", ["setup.py", "megatron"])
def test_what_a_killed_fetch_left_of_a_commit_is_fetched_again(
    checkout: Path, empty_site: megatron_source.Settings, tmp_path: Path, lost: str
) -> None:
    """git writes few objects one by one, the commit among the first."""
    take = taking(checkout, empty_site)
    found = take()
    name = megatron_source.git(found.at, "rev-parse", f"{found.revision}:{lost}").strip()
    (found.at / "objects" / name[:2] / name[2:]).unlink()
    take().unpack(tmp_path / "tree")
    assert (tmp_path / "tree/setup.py").read_text() == "print('setup')\n"


def test_git_removes_no_commit_of_the_cache(
    checkout: Path,
    empty_site: megatron_source.Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config").write_text(
        "[gc]\n auto = 1\n autoPackLimit = 1\n autoDetach = false\n pruneExpire = now\n"
        "[fetch]\n unpackLimit = 1\n[user]\n name = a\n email = a@example.org\n"
    )
    first = commit_all(checkout)
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    url = checkout.as_uri()
    folder = megatron_source.repository(url, first, empty_site)
    for number in range(3):
        megatron_source.git(checkout, "commit", "-q", "--allow-empty", "-m", str(number))
        megatron_source.repository(
            url, megatron_source.git(checkout, "rev-parse", "HEAD").strip(), empty_site
        )
    assert megatron_source.git(folder, "cat-file", "-t", first).strip() == "commit"


def test_a_mirror_s_password_is_in_no_message(empty_site: megatron_source.Settings) -> None:
    site = replace(empty_site, git_mirror="http://me:secret@127.0.0.1:1/")
    url = "https://github.com/NVIDIA/Megatron-LM.git"
    for fails in (
        partial(megatron_source.repository, url, "d" * 40, site),
        partial(megatron_source.commit_of, url, "core_r1", site),
        partial(fetch.archive, Interpreter(url=f"{url}/python.tar.gz", sha256="a" * 64), site),
    ):
        with pytest.raises(BuildError, match=r"//127\.0\.0\.1:1/") as caught:
            fails()
        assert "secret" not in str(caught.value)


def test_no_address_is_an_option_of_git(
    empty_site: megatron_source.Settings, tmp_path: Path
) -> None:
    """`--upload-pack=` names a program that git runs on this machine."""
    mark = tmp_path / "mark"
    url = f"--upload-pack=touch {mark};"
    with pytest.raises(ValidationError, match="doesn't look like a git address"):
        GitSource(url=url, ref="core_r1")
    for asks in (megatron_source.commit_of, megatron_source.repository):
        with pytest.raises(BuildError):
            asks(url, "d" * 40, empty_site)
    assert not mark.exists()


def tree_of(repository: Path) -> str:
    return megatron_source.git(repository, "rev-parse", "HEAD^{tree}").strip()


def test_a_tree_s_hash_is_git_s(checkout: Path) -> None:
    (checkout / "empty/deep").mkdir(parents=True)
    (checkout / "a").mkdir()
    (checkout / "a/b").write_text("")
    for name in ("a.b", "a-b", "a0", "with space", "ünïcode"):  # a folder sorts as a/ among them
        (checkout / name).write_text(name)
    (checkout / "a0").chmod(0o755)
    (checkout / "link").symlink_to("a/b")
    (checkout / "dangling").symlink_to("nowhere")
    (checkout / "folder").symlink_to("a")
    commit_all(checkout)
    bare = checkout.with_name("bare")
    (checkout / ".git").rename(bare)
    assert megatron_source.tree_hash(checkout) == tree_of(bare)


def locked_at(commit: str, repository: Path, ref: str | None = None) -> LockedRelease:
    tree = megatron_source.git(repository, "rev-parse", f"{commit}^{{tree}}").strip()
    return LockedRelease(git=LockedGit(commit=commit, ref=ref, tree=tree, epoch=1700000000))


def release(url: str, **named: str) -> MegatronRelease:
    return MegatronRelease(git=GitSource(url=url, **named), patches="", extension="x")


def taking(
    checkout: Path, site: megatron_source.Settings
) -> Callable[[], megatron_source.MegatronSource]:
    """Commits all of a checkout; takes that commit from the cache, fetched where it isn't there."""
    commit = commit_all(checkout)
    pinned, named = locked_at(commit, checkout), release(checkout.as_uri(), commit=commit)
    return partial(megatron_source.from_git, "0.9.0", named, pinned, site)


def test_a_byte_changed_in_git_s_cache_is_refused(
    checkout: Path, empty_site: megatron_source.Settings, tmp_path: Path
) -> None:
    """An object written anew, as whoever changes it on purpose would: zlib finds no fault."""
    take = taking(checkout, empty_site)
    found = take()
    blob = megatron_source.git(found.at, "rev-parse", f"{found.revision}:setup.py").strip()
    loose = found.at / "objects" / blob[:2] / blob[2:]
    content = zlib.decompress(loose.read_bytes())
    loose.chmod(0o644)
    loose.write_bytes(zlib.compress(content.replace(b"setup", b"setuq")))
    with pytest.raises(BuildError) as caught:
        take().unpack(tmp_path / "tree")
    assert found.identity in caught.value.problem
    assert megatron_source.tree_hash(tmp_path / "tree") in caught.value.problem


@pytest.mark.parametrize("setting", ["autocrlf = true", "eol = crlf"])
def test_a_user_s_line_endings_change_no_tree(
    checkout: Path,
    empty_site: megatron_source.Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    setting: str,
) -> None:
    (checkout / ".gitattributes").write_text("*.py text\n")
    take = taking(checkout, empty_site)
    (tmp_path / "attributes").write_text("* text eol=crlf\n")
    (tmp_path / "config").write_text(
        f"[core]\n {setting}\n attributesFile = {tmp_path / 'attributes'}\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    take().unpack(tmp_path / "tree")
    assert (tmp_path / "tree/setup.py").read_bytes() == b"print('setup')\n"


def test_a_branch_that_was_moved_is_refused_with_both_commits(
    checkout: Path, empty_site: megatron_source.Settings
) -> None:
    first = commit_all(checkout)
    branch = megatron_source.git(checkout, "symbolic-ref", "--short", "HEAD").strip()
    pinned, named = locked_at(first, checkout, branch), release(checkout.as_uri(), ref=branch)
    (checkout / "setup.py").write_text("print('later')\n")
    second = commit_all(checkout)
    with pytest.raises(BuildError) as caught:
        megatron_source.from_git("0.9.0", named, pinned, empty_site)
    assert first in caught.value.problem
    assert second in caught.value.problem
    assert "make lock" in caught.value.remedy
    megatron_source.git(checkout, "reset", "-q", "--hard", first)
    assert megatron_source.from_git("0.9.0", named, pinned, empty_site).revision == first
    megatron_source.git(checkout, "reset", "-q", "--hard", second)
    assert (
        megatron_source.from_git("0.9.0", named, pinned, empty_site).revision == first
    )  # it is there


def test_a_tag_goes_before_a_branch_and_an_annotated_one_is_its_commit(
    checkout: Path, empty_site: megatron_source.Settings
) -> None:
    first = commit_all(checkout)
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    megatron_source.git(checkout, *who, "tag", "-a", "-m", "x", "core_v1")
    megatron_source.git(checkout, "branch", "core_r1")
    (checkout / "setup.py").write_text("print('later')\n")
    second = commit_all(checkout)
    megatron_source.git(checkout, "branch", "core_v1")
    asked = partial(megatron_source.commit_of, checkout.as_uri(), site=empty_site)
    assert asked("core_v1") == first
    assert asked("core_r1") == first
    assert first != second
    with pytest.raises(BuildError, match="no tag and no branch core_v2"):
        asked("core_v2")


def test_a_lock_of_another_commit_or_branch_says_to_lock(
    empty_site: megatron_source.Settings,
) -> None:
    pinned = locked("a" * 40, "b" * 40)
    for named in (release("https://a/x", commit="c" * 40), release("https://a/x", ref="core_r1")):
        with pytest.raises(UsageError) as caught:
            megatron_source.from_git("0.9.0", named, pinned, empty_site)
        assert "make lock" in caught.value.remedy
