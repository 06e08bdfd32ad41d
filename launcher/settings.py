"""Folders and mirrors, from the environment: the one place where a site's differences stand."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Settings:
    """What differs from site to site.

    cache: content-addressed downloads and source trees (LAUNCHER_CACHE)
    matrix: the matrix file (LAUNCHER_MATRIX); its lock, template and patches lie beside it
    torch_index: asked for what the user's own pip configuration doesn't have, which is the CPU
        build of PyTorch (LAUNCHER_TORCH_INDEX; empty to ask no other index)
    runs: a folder for each run's record (LAUNCHER_RUNS)
    git_mirror: put in place of `https://github.com/` in a source's URL (LAUNCHER_GIT_MIRROR)
    """

    cache: Path
    matrix: Path
    torch_index: str
    git_mirror: str
    runs: Path


def settings() -> Settings:
    """The settings of this process. Package mirrors are pip's own: PIP_INDEX_URL or pip.conf."""
    env = os.environ
    home_cache = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    state = Path(env.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return Settings(
        cache=_path(env.get("LAUNCHER_CACHE") or home_cache / "megatron-launchpad"),
        matrix=_path(env.get("LAUNCHER_MATRIX") or ROOT / "matrix.yaml"),
        torch_index=env.get("LAUNCHER_TORCH_INDEX", "https://download.pytorch.org/whl/cpu"),
        git_mirror=env.get("LAUNCHER_GIT_MIRROR", "https://github.com/"),
        runs=_path(env.get("LAUNCHER_RUNS") or state / "megatron-launchpad/runs"),
    )


def _path(value: str | Path) -> Path:
    """An absolute path: a relative one would mean another folder to an engine or to git."""
    return Path(value).expanduser().absolute()
