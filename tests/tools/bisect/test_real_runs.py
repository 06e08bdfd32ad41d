"""Bisects by real runs of a script on this machine: each way to judge, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest

from launcher.base.settings import ROOT
from tests.conftest import missing

ABSENT = missing("torch", "megatron.core")
pytestmark = [
    pytest.mark.long,
    pytest.mark.megatron,
    pytest.mark.skipif(bool(ABSENT), reason=f"{' and '.join(ABSENT)} can't be imported here"),
]

PROGRAM = """
import os, sys
worse, how = os.environ.get("WORSE") == "yes", os.environ["HOW"]
ms, loss = 90.0 if worse and how == "ms" else 30.0, 4.0 if worse and how == "loss" else 3.0
for at in range(1, 7):
    print(f" iteration {at:8d}/       6 | consumed samples: {at * 4:12d} "
          f"| elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000000E-03 "
          f"| global batch size:     4 | lm loss: {loss + 0.01 * at:.6E} | loss scale: 1.0 "
          "| number of skipped iterations:   0 |")
if worse and how in ("cause", "code"):
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    sys.exit(1)
print("worse" if worse else "as it was")
"""
KEYS = ("APPLE", "BEECH", "CEDAR", "ELDER", "WORSE", "XYLEM", "YARROW")
WAYS = {
    "code": (),
    "cause": ("--cause", "GPU memory is out"),
    "loss": ("--loss", "0.5"),
    "ms": ("--ms", "2"),
    "check": ("--check", '! grep -q "^worse" "$BISECT_LOG"'),
}


def command(folder: Path, how: str) -> tuple[list[str], dict[str, str]]:
    """A bisect of two files that differ in seven variables, and its environment."""
    (folder / "program.py").write_text(PROGRAM)
    base = {"name": "planted", "image": "cpu", "program": "./program.py", "gpus": 0}
    for name, value in (("good", "no"), ("bad", "yes")):
        config = base | {"env": {"HOW": how, **dict.fromkeys(KEYS, value)}}
        (folder / f"{name}.yaml").write_text(json.dumps(config))
    argv = [sys.executable, "-m", "launcher", "bisect", "good.yaml", "bad.yaml", "--json"]
    own = {"LAUNCHER_RUNS": str(folder / "runs"), "PYTHONPATH": str(ROOT)}
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return [*argv, "--backend", "local", *WAYS[how]], os.environ | own | {"PATH": search}


def bisected(folder: Path, how: str) -> dict[str, Any]:
    argv, env = command(folder, how)
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("how", WAYS)
def test_a_key_of_seven_is_found_by_each_way_to_judge(how: str, tmp_path: Path) -> None:
    found = bisected(tmp_path, how)
    assert [cause["name"] for cause in found["causes"]] == ["env.WORSE"]
    assert found["enough"] is True
    compares = how in ("loss", "ms")  # which takes a run of GOOD first
    assert found["trials"] <= ceil(log2(len(KEYS))) + 2 + compares, found


def trials(folder: Path) -> list[str]:
    """The lines that are kept of trials."""
    return [
        line
        for path in (folder / "runs").glob("bisect-*/trials.jsonl")
        for line in path.read_text().splitlines()
    ]


def test_one_that_is_killed_goes_on_with_the_trials_that_it_had(tmp_path: Path) -> None:
    argv, env = command(tmp_path, "code")
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=subprocess.DEVNULL) as process:
        while len(trials(tmp_path)) < 2 and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    had = trials(tmp_path)
    assert len(had) in (2, 3)
    found = bisected(tmp_path, "code")
    assert [cause["name"] for cause in found["causes"]] == ["env.WORSE"]
    assert trials(tmp_path)[: len(had)] == had
    assert found["trials"] == len(trials(tmp_path)) <= ceil(log2(len(KEYS))) + 2
