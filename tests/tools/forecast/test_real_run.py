"""A real run on the CPU, and its forecast from its own record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.runs.records import record
from launcher.tools.forecast import usage
from launcher.tools.forecast.forecast import Hardware, forecast
from tests.conftest import missing

ROOT = Path(__file__).parents[3]

pytestmark = [
    pytest.mark.long,
    pytest.mark.megatron,
    pytest.mark.skipif(bool(missing("torch", "megatron.core")), reason="no torch or megatron.core"),
]


def test_a_forecast_of_a_finished_run_by_its_record_is_within_a_tenth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    launcher = [sys.executable, "-m", "launcher"]
    keys = "checkpoint.save=ck checkpoint.save_interval=40 logging.eval_interval=30"
    sets = [word for key in keys.split() for word in ("--set", key)]
    asked = [*launcher, "run", "gpt2-tiny", "--backend", "local", *sets]
    search = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # whose python3 has torch
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": search}
    subprocess.run([*asked, "--set", "training.train_iters=100"], cwd=tmp_path, env=env, check=True)
    (kept,) = record.each()
    run = kept.run
    shown = [*launcher, "runs", "receipt", run, "--json"]
    said = json.loads(subprocess.run(shown, env=env, check=True, capture_output=True).stdout)
    assert said["iterations"] == 100
    assert said["data_is_known"]
    assert (said["saves"], said["evaluations"]) == (2, 3)
    fact = usage.of_run(run)
    assert fact
    found = forecast(fact.work, Hardware(fact.place), [fact])
    assert found.step
    assert found.hours
    assert found.step.ms == pytest.approx(fact.ms, rel=0.1)
    assert found.hours.value * 3600 == pytest.approx(fact.total, rel=0.1)
    assert fact.total == pytest.approx(said["seconds"], abs=0.001)
