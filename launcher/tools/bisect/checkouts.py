"""Commits of a Megatron-LM checkout: what lies between two of them, and their files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launcher.base.errors import BuildError, UsageError
from launcher.images.sources import megatron_source

EDITED = "+edited"
SHORT = 10
"""Characters of a commit that are shown."""


@dataclass(frozen=True)
class Checkout:
    """A folder with Megatron-LM, at a commit of its repository; where that is "", as it stands."""

    folder: Path
    commit: str = ""

    def __str__(self) -> str:
        return self.commit[:SHORT] or f"{self.folder} as it stands"

    @property
    def described(self) -> str:
        """The commit with its date, its author and its subject."""
        if not self.commit:
            return str(self)
        shown = ["show", "--no-patch", "--format=%h %as %an: %s", "--abbrev=10", self.commit]
        return megatron_source.git(self.folder, *shown, "--").strip()

    def write(self, folder: Path) -> Path:
        """The files, in `folder` or, as it stands, where they are. Raises BuildError."""
        if not self.commit:
            return self.folder
        folder.mkdir()
        megatron_source.archive(self.folder, self.commit, folder)
        return folder


def checkout(folder: Path, revision: str = "") -> Checkout:
    """A checkout at a revision, or as it stands: at its commit, where nothing is edited.

    Raises UsageError where there is no such revision.
    """
    if not revision:
        now = megatron_source.revision(folder) if folder.is_dir() else "unversioned"
        return Checkout(folder, "" if now.endswith(EDITED) or now == "unversioned" else now)
    asked = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    done = megatron_source.run_git(*asked, at=folder) if folder.is_dir() else None
    if done is None or done.returncode:
        raise UsageError(f"{folder}: there is no commit {revision} in this folder's repository")
    return Checkout(folder, done.stdout.strip())


def between(good: Checkout, bad: Checkout) -> tuple[list[Checkout], str]:
    """The checkouts from `good` to `bad`, both included; and why none between them is known, or "".

    They are the commits of BAD's branch, of a merge the first parent's side. Where GOOD isn't among
    them, the first is the one that the branch left GOOD's at. Edits that aren't committed are last.
    """
    last = bad.commit or _head(bad.folder)
    if good == bad:
        return [good, bad], ""
    if not (good.commit and last):
        return [good, bad], "the checkout as it stands is no commit"
    if megatron_source.run_git(
        "cat-file", "-e", f"{good.commit}^{{commit}}", at=bad.folder
    ).returncode:
        return [good, bad], f"{bad.folder} has no commit {good}"
    found = [good.commit, *_branch(bad.folder, good.commit, last)]
    if found[-1] != last:  # BAD is the older one
        found = [*_branch(bad.folder, last, good.commit)[::-1], last]
    checkouts = [Checkout(bad.folder, commit) for commit in dict.fromkeys(found)]
    return [*checkouts, *([] if bad.commit else [bad])], ""


def _branch(folder: Path, first: str, last: str) -> list[str]:
    """The commits after `first` on the way to `last`, oldest first; none where there is none."""
    found = megatron_source.git(
        folder, "rev-list", "--reverse", "--first-parent", f"{first}..{last}"
    ).split()
    parent = (
        megatron_source.run_git("rev-parse", "--verify", "--quiet", f"{found[0]}^1", at=folder)
        if found
        else None
    )
    left = parent.stdout.split() if parent else []
    return [*(one for one in left if one != first), *found]


def _head(folder: Path) -> str:
    """The commit of a checkout with edits; "" of a folder without git."""
    try:
        return (
            megatron_source.revision(folder).removesuffix(EDITED)
            if (folder / ".git").exists()
            else ""
        )
    except BuildError:
        return ""
