"""The refusal as a user meets it, with a real engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.runs.datasets import indexed
from tests.e2e.command import launcher

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine


@pytest.fixture
def run(tmp_path: Path, python_image: str) -> list[str]:
    """A run on data that was cut short, in an image without a training program."""
    indexed.write(tmp_path / "corpus", [[1, 2, 3]], 256)
    os.truncate(tmp_path / "corpus.bin", 4)
    return ["run", "gpt2-tiny.yaml", "--set", f"image={python_image}",
            "--set", f"data.path={tmp_path}/corpus", "--set", "name=cut-short",
            "--set", f"data.cache={tmp_path}/cache"]  # fmt: skip


def test_what_cant_work_isnt_started(run: list[str], engine: DockerClient, tmp_path: Path) -> None:
    done = launcher(*run)
    assert done.returncode == 121, done.stderr
    assert f"{tmp_path}/corpus.bin: 4 bytes, and its index ends at 6" in done.stderr
    assert done.stderr.startswith("launcher: --set data.path=")
    assert not engine.containers.list(all=True, filters={"name": "cut-short"})
    assert not (tmp_path / "cache").exists()


def test_no_preflight_starts_it(run: list[str]) -> None:
    done = launcher(*run, "--no-preflight")
    assert done.returncode == 121
    assert "index ends" not in done.stderr
    assert "has no torch" in done.stderr  # which the container says
