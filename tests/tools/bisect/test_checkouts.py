"""Commits between two of a checkout, for a straight branch, a fork, a merge and edits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.tools.bisect import checkouts
from launcher.tools.bisect.checkouts import Checkout, checkout

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    """A repository with commits 0 to 4; branch `side` leaves it at 2 with one of its own, s."""
    own = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "gc.auto=0")

    def run(*words: str) -> str:
        done = subprocess.run(
            ["git", *own, *words], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def commit(name: str) -> None:
        (tmp_path / name).write_text(name)
        run("add", "--all")
        run("commit", "--quiet", "-m", name)
        run("tag", name)

    run("init", "--quiet", "--initial-branch=main")
    for number in range(5):
        commit(f"v{number}")
    run("checkout", "--quiet", "-b", "side", "v2")
    commit("s")
    run("checkout", "--quiet", "main")
    return run


@pytest.mark.parametrize(
    ("good", "bad", "between"),
    [
        ("v1", "v4", "v1 v2 v3 v4"),
        ("v4", "v1", "v4 v3 v2 v1"),
        ("s", "v4", "s v2 v3 v4"),
        ("v3", "v4", "v3 v4"),
        ("v0", "v4", "v0 v1 v2 v3 v4"),
    ],
)
def test_the_commits_between_two(
    git: Git, tmp_path: Path, good: str, bad: str, between: str
) -> None:
    """Older to newer, newer to older, and from another branch by way of where it left."""
    found, why = checkouts.between(checkout(tmp_path, good), checkout(tmp_path, bad))
    assert why == ""
    assert [git("log", "-1", "--format=%s", one.commit) for one in found] == between.split()


def test_a_merge_is_one_step(git: Git, tmp_path: Path) -> None:
    """Its branch's commits may never have run on their own."""
    git("merge", "--quiet", "--no-ff", "-m", "merged", "side")
    found, _ = checkouts.between(checkout(tmp_path, "v3"), checkout(tmp_path, "HEAD"))
    names = [git("log", "-1", "--format=%s", one.commit) for one in found]
    assert names == ["v3", "v4", "merged"]


def test_edits_that_are_not_committed_come_last(git: Git, tmp_path: Path) -> None:
    """They were left out, and the last commit was blamed for them."""
    (tmp_path / "v4").write_text("edited")
    found, why = checkouts.between(checkout(tmp_path, "v3"), checkout(tmp_path))
    assert why == ""
    assert [one.commit for one in found] == [git("rev-parse", "v3"), git("rev-parse", "v4"), ""]
    assert (found[-1].write(tmp_path / "x") / "v4").read_text() == "edited"
    assert (found[-2].write(tmp_path / "y") / "v4").read_text() == "v4"
    assert not (tmp_path / "x").exists()


def test_what_is_no_commit_has_none_between(git: Git, tmp_path: Path) -> None:
    (tmp_path / "v4").write_text("edited")
    pair = [checkout(tmp_path), checkout(tmp_path, "v3")]
    assert checkouts.between(*pair) == (pair, "the checkout as it stands is no commit")
    other = [Checkout(tmp_path, "0" * 40), checkout(tmp_path, "v3")]
    assert "has no commit 0000000000" in checkouts.between(*other)[1]


@pytest.mark.parametrize("revision", ["nope", "--all", "v3^{tree}"])
def test_a_commit_that_is_not_there_is_refused(git: Git, tmp_path: Path, revision: str) -> None:
    with pytest.raises(UsageError, match="there is no commit"):
        checkout(tmp_path, revision)
