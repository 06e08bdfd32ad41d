"""TensorBoard reads the log's numbers back; what isn't there is told. W&B: e2e/test_trained."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import writers
from tests.agent.conftest import TINY, Run, start

Train = Callable[..., Run]
TAGS = ("lm loss", "learning-rate", "grad-norm", "loss-scale", "batch-size")

# Stands in for Weights & Biases, which needs a server.
WANDB = """
def init(dir, project, name, config):
    raise RuntimeError("No API key configured.\\nUse wandb login.")
"""


def read(folder: Path) -> dict[str, dict[int, float]]:
    """Every tag's value by step, by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        tag: {event.step: event.value for event in events.Scalars(tag)}
        for tag in events.Tags()["scalars"]
    }


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    for option, package in (("--tensorboard-dir", "tensorboard"), ("--wandb-project", "wandb")):
        with pytest.raises(OptionError, match=f"{option} needs the Python package {package}"):
            writers.check_packages(command_line.parse([*TINY, "--mock-data", option, "x"]))
    writers.check_packages(command_line.parse([*TINY, "--mock-data"]))


@pytest.mark.long  # with the launcher: tests/e2e/test_trained.py
@pytest.mark.megatron
def test_tensorboard_has_the_logs_numbers(train: Train, tmp_path: Path) -> None:
    plain = train(2, "--log-interval", "3")
    run = train(2, "--log-interval", "3", "--tensorboard-dir", str(tmp_path))
    found = read(tmp_path)
    assert (run.losses, run.validation_loss) == (plain.losses, plain.validation_loss)
    for tag in TAGS:
        assert list(found[tag]) == [1, 2, 3, 4, 5, 6]
        assert list(found[f"{tag} vs samples"]) == [4, 8, 12, 16, 20, 24]
    by_interval = list(found["lm loss"].values())
    means = {3: sum(by_interval[:3]) / 3, 6: sum(by_interval[3:]) / 3}
    assert means == pytest.approx(run.losses, abs=1e-5)
    assert [found["grad-norm"][3], found["grad-norm"][6]] == pytest.approx(run.grad_norms, abs=1e-3)
    assert found["lm loss validation"] == {6: pytest.approx(run.validation_loss, abs=1e-5)}
    assert found["batch-size"][1] == 4
    rates = [float(rate) for rate in re.findall(r"learning rate: (\S+)", run.output)]
    assert [found["learning-rate"][3], found["learning-rate"][6]] == pytest.approx(rates)
    times = [float(ms) for ms in re.findall(r"per iteration \(ms\): (\S+)", run.output)]
    assert [1000 * s for s in found["iteration-time"].values()] == pytest.approx(times, abs=0.1)


@pytest.mark.long
@pytest.mark.megatron
def test_a_resumed_run_writes_over_what_came_after_its_checkpoint(
    train: Train, tmp_path: Path
) -> None:
    folder, board = tmp_path / "save", ["--tensorboard-dir", str(tmp_path / "board")]
    saving = ["--save", str(folder), "--tensorboard-log-interval", "2"]
    train(1, *saving, *board, "--train-iters", "4", "--lr-decay-iters", "6")
    whole = train(1, *board, "--train-iters", "6", "--load", str(folder), "--lr", "2e-2")
    found = read(tmp_path / "board")["lm loss"]
    assert list(found) == [2, 4, 5, 6]
    train(1, *saving[2:], *board, "--load", str(folder))
    again = read(tmp_path / "board")["lm loss"]
    assert list(again) == [2, 4, 6]
    assert again[4] == found[4]
    assert again[6] != pytest.approx(whole.losses[6], abs=1e-6)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ("--wandb-project refused --wandb-exp-name n", 1, "W&B doesn't start: No API key confi"),
        ("--tensorboard-dir file/board", 1, "can't write to file/board: Not a directory"),
        ("--memory-samples file/m", 2, "can't write to file/m: Not a directory"),
    ],
)
def test_what_cannot_be_written_is_told_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, code: int, said: str
) -> None:
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    run = start(1, "-m", "launcher.trainer.gpt", *TINY, "--mock-data", *options.split())
    assert run.code == code, run.output
    assert run.output.count(f"gpt: {said}") == 1
    assert "Traceback" not in run.output
