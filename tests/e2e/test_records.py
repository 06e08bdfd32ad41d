"""What is kept of real runs: all that they were made of, and enough to repeat one exactly."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.settings import ROOT
from tests.e2e.command import launcher, refused

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

SECONDS = 180


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for this test's records alone."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def file(tmp_path: Path, cpu_images: CpuImages) -> Path:
    """A run of two ranks that share tensors, with dropout, which its random states decide."""
    config = {
        "name": "records",
        "image": cpu_images.build(),
        "gpus": 0,
        "processes": 2,
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": 32,
            "make_vocab_size_divisible_by": 64,
        },
        "training": {"micro_batch_size": 2, "global_batch_size": 4, "train_iters": 8, "lr": 0.01},
        "parallel": {"tensor_model_parallel_size": 2},
        "data": {"mock": True, "vocab_size": 100},
        "checkpoint": {"save": "ck", "load": "ck", "save_interval": 4},
        "logging": {"log_interval": 1, "eval_interval": 100, "eval_iters": 1},
    }
    path = tmp_path / "records.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def losses(folder: Path) -> list[tuple[int, float]]:
    """Iterations and losses of a run's metrics, of the last attempt that had each."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = (step for line in lines if (step := json.loads(line))["kind"] == "step")
    return sorted({step["iteration"]: step["loss"] for step in steps}.items())


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_a_run_is_repeated_to_every_digit_and_not_where_something_has_changed(
    engine: DockerClient, file: Path, runs: Path
) -> None:
    first = launcher("run", str(file), cwd=file.parent, PYTHONPATH=str(ROOT))
    assert first.returncode == 0, first.stderr
    (was,) = runs.glob("*/")
    again = launcher("rerun", "records", cwd=ROOT)
    assert again.returncode == 0, again.stderr
    (other,) = (path for path in runs.glob("*/") if path != was)
    assert len(losses(was)) == 8
    assert losses(was) == losses(other)
    for iteration in ("iter_0000004", "iter_0000008"):
        files = [path for path in (file.parent / "ck" / iteration).glob("*.distcp")]
        assert files
        for path in files:
            twin = file.parent / "ck-rerun" / iteration / path.name
            assert path.read_bytes() == twin.read_bytes()

    facts, image = read(was / "facts.json"), engine.images.get(read(was / "plan.json")["image"])
    assert facts["image"]["id"] == image.id
    assert facts["machine"]["engine"]["version"] == engine.version()["Version"]
    build = read(was / "build.json")
    assert len(build["wheel"]["sha256"]) == 64
    assert build["patches"]
    assert build["release"] == facts["image"]["labels"]["megatron-launchpad.megatron"]
    assert first.stdout.encode() == (was / "log").read_bytes()[: len(first.stdout.encode())]
    (ending,) = map(json.loads, (was / "endings.jsonl").read_text().splitlines())
    assert (ending["outcome"], ending["by"], ending["iteration"]) == ("finished", "itself", 8)

    facts["launcher"] = "0.0.1"
    (was / "facts.json").write_text(json.dumps(facts))
    refused(launcher("rerun", was.name), 121, "0.0.1", "--force")
    assert len([*runs.glob("*/")]) == 2


def test_the_log_of_a_run_is_whole_though_its_launcher_was_killed_and_it_began_again(
    engine: DockerClient, file: Path, runs: Path
) -> None:
    options = ["--set", "training.train_iters=100000", "--set", "max_restarts=1"]
    argv = [sys.executable, "-m", "launcher", "run", str(file), *options]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, cwd=file.parent, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout
        until(lambda: b"iteration       20/" in process.stdout.readline())
        (folder,) = runs.glob("*/")
        process.send_signal(signal.SIGKILL)
    argv = [sys.executable, "-m", "launcher", "attach", folder.name]
    with subprocess.Popen(argv, env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout
        until(lambda: b"iteration       30/" in process.stdout.readline())
        label = f"megatron-launchpad.run={folder.name}"
        (container,) = engine.containers.list(filters={"label": label})
        container.kill()
        until(lambda: b"loaded " in process.stdout.readline())  # the second attempt
        until(lambda: b"iteration " in process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    numbers = [number for number, _ in losses(folder)]
    assert numbers == list(range(1, len(numbers) + 1))  # none is missing
    assert len(numbers) >= 30
    first, second = map(json.loads, (folder / "endings.jsonl").read_text().splitlines())
    assert (first["attempt"], first["outcome"], first["code"]) == (0, "failed", 137)
    assert (second["attempt"], second["by"]) == (1, "the launcher, on SIGINT")
    assert (second["outcome"], second["code"]) == ("stopped", 0)
    logs = launcher("logs", folder.name)
    assert logs.returncode == 0
    whole = b"".join((folder / name).read_bytes() for name in ("log", "log.1"))
    assert logs.stdout.encode() == whole
    assert logs.stdout.count("iteration        1/") == 1
    listed = launcher("runs", "--state", "stopped", "--quiet")
    assert listed.stdout.split() == [folder.name]


def until(done: Any) -> None:
    """Wait for `done`, which takes a line each time it is asked."""
    end = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < end
