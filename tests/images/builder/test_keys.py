"""`launcher matrix list --keys`: what an image's identity depends on, and what it doesn't."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.settings import ROOT, settings
from launcher.images.builder.keys import keys
from launcher.images.matrix.matrix_file import load_lock, load_matrix


@pytest.fixture(scope="module")
def found() -> list[list[str]]:
    """Row, release and key of each image of this checkout."""
    at = settings().matrix
    made = keys(load_matrix(), load_lock(at.with_suffix(".lock")), at.parent)
    return [[*one] for one in made]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What a checkout has that the command reads."""
    for name in ("launcher", "patches"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("matrix.yaml", "matrix.lock", "Dockerfile.template"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def listed(checkout: Path) -> list[list[str]]:
    command = [sys.executable, "-m", "launcher", "matrix", "list", "--keys"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    return [line.split() for line in done.stdout.splitlines()]


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_an_edit_of_what_travels_with_a_run_changes_no_key(
    checkout: Path, found: list[list[str]]
) -> None:
    """In the runner, the trainer, a GPU kernel or a series' data; and another version of ours."""
    names = ["agent/runner.py", "trainer/gpt/model.py", "base/files.py"]
    if (checkout / "launcher/trainer/fast").exists():  # it is optional
        names.append("trainer/fast/kernels/tokens.py")
    for name in names:
        edited(checkout / "launcher" / name, "\nimport ", "\n# a comment\nimport ")
    edited(checkout / "launcher/agent/series/0.16.json", '"begins"', ' "begins"')
    edited(checkout / "launcher/__init__.py", '__version__ = "', '__version__ = "9.')
    assert listed(checkout) == found
    assert len({key for *_, key in found}) == len(found) > 20
    edited(checkout / "launcher/images/builder/stage.py", "\nimport ", "\n# a comment\nimport ")
    assert not {key for *_, key in listed(checkout)} & {key for *_, key in found}


def test_each_row_and_release_that_fit_have_one(found: list[list[str]]) -> None:
    own = {(tag, row.megatron) for tag, row in load_matrix().rows.items()}
    assert own <= {(tag, release) for tag, release, _ in found}
