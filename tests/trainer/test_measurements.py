"""The log's lines are upstream's to the character; samples of memory; the summary of a run."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.agent import words
from launcher.agent.ranks.exit_codes import OptionError
from launcher.trainer.gpt import arguments as command_line
from launcher.trainer.gpt import measurements
from launcher.trainer.gpt.log import training_line, validation_line
from launcher.trainer.gpt.measurements import MEGABYTE
from tests.agent.conftest import TINY, Run

Train = Callable[..., Run]

INTERVAL: dict[str, Any] = {
    **{"iteration": 20, "train_iters": 1000, "consumed_samples": 320, "global_batch_size": 16},
    **{"milliseconds": 820.7, "learning_rate": 4e-5, "loss": 10.72453, "loss_scale": 131072.0},
    **{"grad_norm": 3.874, "skipped": 0, "nan": 0},
}
LOSS = " lm loss: 1.072453E+01 |"
NORM = " grad norm: 3.874 |"
LINE = (
    " [2025-04-13 23:41:20] iteration       20/    1000 | consumed samples:          320 | "
    "elapsed time per iteration (ms): 820.7 | learning rate: 4.000000E-05 | "
    f"global batch size:    16 |{LOSS} loss scale: 131072.0 |{NORM} "
    "number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_training_line() -> None:
    """Where nothing advanced, there is neither loss nor norm."""
    assert training_line("2025-04-13 23:41:20", **INTERVAL) == LINE
    nothing = INTERVAL | {"loss": None, "grad_norm": None}
    without = LINE.replace(LOSS, "").replace(NORM, "")
    assert training_line("2025-04-13 23:41:20", **nothing) == without
    spent = LINE.replace("820.7 |", "820.7 | energy per GPU (J/iter/GPU): 512.25 |")
    assert training_line("2025-04-13 23:41:20", **INTERVAL, energy=512.25) == spent


def test_validation_line() -> None:
    assert validation_line(50, 8.88954) == (
        "validation loss at iteration 50 | lm loss value: 8.889540E+00 | "
        "lm loss PPL: 7.255681E+03 | "
    )


def test_upstreams_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"allocated": MEGABYTE * 4393 // 3, "reserved": MEGABYTE * 1576}
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(measurements, "current", lambda on_cpu: now)
    monkeypatch.setattr(measurements, "peak", lambda on_cpu: now | {"allocated": MEGABYTE * 1500})
    assert measurements.memory_line(10) == (
        "[Rank 3] (after 10 iterations) memory (MB) | allocated: 1464.33 | "
        "max allocated: 1500.00 | reserved: 1576.00 | max reserved: 1576.00"
    )


def test_symmetric_memory_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of GPT-2 had 0.5 GB more than their line said."""
    names = ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved")
    cuda = SimpleNamespace(**{name: lambda at=at: at for at, name in enumerate(names)})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(measurements, "symmetric", [100, 20])
    assert measurements.current(on_cpu=False) == {"allocated": 120, "reserved": 121}
    assert measurements.peak(on_cpu=False) == {"allocated": 122, "reserved": 123}


@pytest.mark.megatron
def test_an_evaluation_that_needs_more_memory_has_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """GPT-2's only line said 6.3 GB, and its evaluation took 7.2."""
    report = pytest.importorskip("launcher.trainer.gpt.step_report")
    monkeypatch.setattr(report.measurements, "memory_line", "after {}".format)
    monkeypatch.setattr(report.parallel_state, "get_data_parallel_rank", lambda: 0)
    one = report.StepReport.__new__(report.StepReport)
    one.arguments, one.most = SimpleNamespace(on_cpu=False), 0
    for iteration, most in enumerate((6300, 6300, 7200, 7000), 1):
        monkeypatch.setattr(measurements, "peak", lambda _, most=most: {"allocated": most})
        one._log_memory(iteration)
    assert capsys.readouterr().out.split("\n") == ["after 1", "after 3", ""]


NVML = """
#include <string.h>
static unsigned long long used = 5000;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
    *gpu = &used;
    return strcmp(uuid, "GPU-0a1b") ? 6 : 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void *gpu, unsigned long long *mj) {
    *mj = *(unsigned long long *)gpu += 2500;
    return 0;
}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")
@pytest.mark.parametrize(("uuid", "found"), [("0a1b", [7.5, 10.0]), ("ffff", [None, None])])
def test_a_gpus_energy_is_read_from_its_driver(
    uuid: str, found: list[float | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By UUID, as CUDA numbers GPUs otherwise than the driver does, and sees fewer."""
    library = tmp_path / "libnvidia-ml.so.1"
    compiling = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
    subprocess.run(compiling, input=NVML, text=True, check=True)
    there, gpu = ctypes.CDLL(str(library)), SimpleNamespace(uuid=uuid)
    of = {"current_device": lambda: 1, "get_device_properties": lambda device: gpu}
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(**of)))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: there)
    measurements._in_driver.cache_clear()
    assert [measurements.energy(), measurements.energy()] == found
    measurements._in_driver.cache_clear()


@pytest.mark.megatron
def test_samples_and_summary_change_nothing(train: Train, tmp_path: Path) -> None:
    plain = train(2)
    file = tmp_path / "summary.json"
    measured = ["--memory-samples", str(tmp_path / "m"), "--memory-interval", "0.05"]
    run = train(2, *measured, "--performance-summary", str(file))
    assert (run.losses, run.grad_norms) == (plain.losses, plain.grad_norms)
    assert "memory (MB)" not in run.output  # which is a GPU's
    (link,) = words.LINK.findall(plain.output)  # of the replicas
    assert link[:3] == ("1", "2", "CPU")
    assert 0 < float(link[3]) < 1000
    for rank in range(2):
        text = (tmp_path / f"m/rank-{rank}.jsonl").read_text()
        samples = [json.loads(line) for line in text.splitlines()]
        assert len(samples) >= 3
        assert 0.03 < samples[1]["time"] - samples[0]["time"] < 5
        peak = max(sample["resident"] for sample in samples)
        found = json.loads(file.read_text())
        assert 50_000_000 < peak <= found["max_memory_bytes"]["resident"] + 10_000_000
    assert found["steps"] == 6
    assert found["final_loss"] == pytest.approx(run.losses[6], rel=1e-5)
    assert found["tokens_per_second"] == pytest.approx(4 * 32 / found["ms_per_step_median"] * 1000)
    assert found["device"] == "CPU"
    assert set(found["versions"]) == {"python", "torch", "cuda", "megatron_core"}


@pytest.mark.megatron
def test_repeated_samples_are_learnt_by_heart(train: Train) -> None:
    run = train(1, "--mock-samples", "1", "--train-iters", "20")
    whole = train(1, "--train-iters", "20")
    assert run.losses[20] < whole.losses[20] - 0.2


def test_no_folder_for_the_summary(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"the folder .*/nowhere isn't there"):
        measurements.check_summary(str(tmp_path / "nowhere/summary.json"))


def summary(monkeypatch: pytest.MonkeyPatch, seconds: list[float], loss: float) -> dict[str, Any]:
    monkeypatch.setattr(measurements, "_device_and_versions", dict)
    arguments = command_line.parse([*TINY, "--mock-data"])
    layout = command_line.layout(arguments, 2)
    return measurements.summary(arguments, layout, seconds, loss, {"resident": 3})


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_no_steps_and_no_loss_are_null(
    loss: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = summary(monkeypatch, [], loss)
    assert made["final_loss"] is made["ms_per_step_median"] is made["tokens_per_second"] is None
    told = measurements.write(made, tmp_path / "summary.json")
    assert told.endswith("summary.json: no steps")
    assert "NaN" not in (tmp_path / "summary.json").read_text()


def test_the_median_leaves_out_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    made = summary(monkeypatch, [9.0, 0.5, 0.5], 1.5)
    assert (made["ms_per_step_median"], made["tokens_per_second"]) == (500, 4 * 32 / 0.5)
    assert (made["final_loss"], made["max_memory_bytes"]) == (1.5, {"resident": 3})
