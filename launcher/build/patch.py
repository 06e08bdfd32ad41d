"""Applies patches/<release>/*.patch to a source tree, in order; each must apply."""

from __future__ import annotations

import subprocess
from pathlib import Path

from launcher.build.source import AS_COMMITTED, git_environment
from launcher.errors import BuildError

AS_WRITTEN = [*AS_COMMITTED, "-c", "apply.whitespace=nowarn", "-c", "apply.ignoreWhitespace=no"]
"""Options that keep a user's settings from changing what a patch makes."""


def apply(patches: list[Path], tree: Path) -> list[str]:
    """Apply `patches` to `tree` and return their names; one that is there already is left.

    Raises BuildError with the name of the first that doesn't apply: a patch that matches nothing
    would give a wheel that lacks what it was for.
    """
    for path in patches:
        if _git_apply(tree, path, "--check", "--reverse").returncode == 0:
            continue
        done = _git_apply(tree, path)
        if done.returncode:
            raise BuildError(
                f"{path.parent.name}/{path.name} doesn't apply:\n  {done.stderr.strip()}",
                "The source isn't the release this patch was made for, or it has been edited "
                "at the same lines.",
            )
        if _git_apply(tree, path, "--check", "--reverse").returncode:
            raise BuildError(f"{path.parent.name}/{path.name} changed nothing")
    return [path.name for path in patches]


def _git_apply(tree: Path, patch: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `git apply` as outside any repository, where it takes paths from the tree's top."""
    env = git_environment() | {"GIT_CEILING_DIRECTORIES": str(tree.resolve().parent)}
    command = ["git", *AS_WRITTEN, "apply", *options, "--", str(patch.resolve())]
    return subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, check=False)
