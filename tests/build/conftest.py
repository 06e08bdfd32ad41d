"""A small stand-in for a Megatron checkout, and settings that point to an empty cache."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.build import source

INFO = "MAJOR = 0\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ''\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that passes for Megatron 0.9.0 by its package_info.py."""
    path = tmp_path / "Megatron-LM"
    (path / "megatron/core").mkdir(parents=True)
    (path / "megatron/core/package_info.py").write_text(INFO.format(minor=9, patch=0))
    (path / "setup.py").write_text("print('setup')\n")
    return path


def commit_all(path: Path) -> str:
    """Commit all in `path`, a git repository of which any commit may be fetched; the commit."""
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    fetched = ["config", "uploadpack.allowAnySHA1InWant", "true"]
    for command in (["init", "-q"], fetched, ["add", "-A"], [*who, "commit", "-qm", "all"]):
        subprocess.run(["git", "-C", str(path), *command], check=True)
    return source.git(path, "rev-parse", "HEAD").strip()
