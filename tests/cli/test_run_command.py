"""`python -m launcher run` as it is called, with no engine in reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "launcher", "run", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DOCKER_HOST": "unix:///nowhere.sock"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_dry_run_needs_no_engine(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--gpus", "2", "gpt2.yaml", "--dry-run")
    assert code == 0
    told = "launcher: training.precision: auto is "
    assert err.startswith(told)
    assert err.count("\n") == 1
    assert f"--{err.removeprefix(told)[:4]}\n" in out
    assert f"/checkpoints <- {tmp_path}/checkpoints/gpt2 (read-write)" in out
    assert out.splitlines()[-1].startswith("docker run --rm --name gpt2-")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_what_files_are_not_there_yet(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "gpt2-tiny", "--dry-run", "--set", "data.path=corpus")
    assert code == 0
    assert err.splitlines() == [
        f"launcher: data.path: no such file or folder: {tmp_path}/corpus{end}"
        for end in (".bin", ".idx")
    ]


def test_a_run_does(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "gpt2-tiny")
    assert (code, out) == (125, "")
    assert "DOCKER_HOST" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["gpt3"], "no file and no preset 'gpt3'"),
        (["gpt2", "--tag", "24.01"], "--tag 24.01: image.tag: no tag '24.01' in the matrix"),
        (["gpt2", "--backend", "podman"], "no backend 'podman'"),
        (["gpt2", "--gpus", "some"], "--gpus some: gpus: 'some' isn't a request for GPUs"),
        (["gpt2", "--gpus", "3"], "2 or 4 processes in all"),
        (["gpt2", "--set", "model.num_head=1"], "Did you mean 'num_attention_heads'"),
        (["gpt2", "--set", "image.megatron=0.9.1"], "Did you mean '0.9.0'"),
        (["gpt2", "--", "--tensor-model-parallel-size", "2"], "--set parallel.tensor_model"),
        (["gpt2", "--", "--fp61"], "-- --fp61: the program gpt takes no --fp61"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    code, out, err = run(tmp_path, *arguments[:at], "--dry-run", *arguments[at:])
    assert (code, out) == (2, "")
    assert err.startswith("launcher: ")
    assert said in err
    assert "Traceback" not in err


def test_the_rest_reaches_the_program(tmp_path: Path) -> None:
    _, out, _ = run(tmp_path, "gpt2", "--dry-run", "--", "--exit-interval", "5")
    assert out.splitlines()[-1].endswith(" --exit-interval 5")
