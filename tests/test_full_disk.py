"""Commands on a disk that is full: each names the path, and leaves nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.base.settings import ROOT
from launcher.tools.weights import convert
from tests.disks import limited
from tests.tools.weights.models import made

SCRIPT = "torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers 2 --mock-data\n"


def imported(folder: Path) -> list[str]:
    (folder / "train.sh").write_text(SCRIPT)
    return ["import", str(folder / "train.sh"), "-o", str(folder / "to/a.yaml")]


def weights_in(folder: Path) -> list[str]:
    theirs = made(folder / "theirs", "llama")
    return ["checkpoint", "import", str(theirs), "--to", str(folder / "to/a")]


def weights_out(folder: Path) -> list[str]:
    convert.import_(made(folder / "theirs", "llama"), folder / "ours")
    return ["checkpoint", "export", str(folder / "ours"), "--to", str(folder / "to/a")]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "import": imported,
    "checkpoint import": weights_in,
    "checkpoint export": weights_out,
    "fetch": lambda _: ["fetch", "cpu", "--no-images"],
    "matrix lock": lambda folder: ["matrix", "lock", "--root", str(folder / "to")],
    "matrix render": lambda folder: ["matrix", "render", "--root", str(folder / "to")],
}


@pytest.mark.parametrize("most", [pytest.param(0, marks=pytest.mark.long), 40])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_told_with_the_path(tmp_path: Path, name: str, most: int) -> None:
    """ "No space left on device" named none, and a second try found a half-written file there."""
    (tmp_path / "to").mkdir()
    argv = [sys.executable, "-B", "-m", "launcher", *COMMANDS[name](tmp_path)]
    env = os.environ | {"LAUNCHER_CACHE": str(tmp_path / "to"), "PYTHONPATH": str(ROOT)}
    env["TMPDIR"] = str(tmp_path / "to")
    with limited(most):
        done = subprocess.run(argv, env=env, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode != 0
    told = rf"{tmp_path}/to\S*: (File too large|No space left)"
    if name == "import":  # in its temporary folder; Python's tempfile writes there first
        told += rf"|No usable temporary directory found in \['{tmp_path}/to'"
    assert re.search(told, done.stderr), done.stderr
    left = [path for path in (tmp_path / "to").rglob("*") if not path.is_dir()]
    assert left == []
    assert [one for one in os.listdir(tmp_path / "to") if "aside" in one] == []
