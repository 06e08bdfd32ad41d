"""bench.gpu.schedule: its list, who runs on which GPU, and what is kept of one that fails."""

from __future__ import annotations

import json
import os
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.gpu import schedule
from launcher.base.settings import ROOT
from launcher.runs.runfile.origins import PRESETS

JOBS = schedule.load(ROOT / "bench/gpu/jobs.yaml", [])


def test_what_the_jobs_start_is_there() -> None:
    """A module that had moved was seen on a machine with GPUs, minutes after the start."""
    names = [job.name for job in JOBS]
    assert len({*names}) == len(names)
    assert [job.name for job in schedule.load(ROOT / "bench/gpu/jobs.yaml", ["long"])] == [
        "cp2-32k",
        "one-32k",
        "one-32k-evaluated",
    ]
    for job in JOBS:
        assert {*job.after} <= {*names}
        if job.argv:
            module = shlex.split(job.argv)[0]
            assert module == "torch.distributed.run" or find_spec(module), job.argv
        else:
            there = ROOT / "bench/gpu" / job.run, PRESETS / f"{job.run}.yaml"
            assert any(path.is_file() for path in there), job.run


def test_a_job_finds_our_modules_and_none_is_mixed_with_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each starts in a folder of its own; a second time ended in a traceback, jobs still going."""
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.chdir(ROOT)
    (tmp_path / "jobs.yaml").write_text("jobs: [{name: a, argv: bench.gpu.schedule --help}]")
    argv = ["schedule", str(tmp_path / "jobs.yaml"), "--to", str(tmp_path / "to")]
    monkeypatch.setattr(sys, "argv", argv)
    schedule.main()
    assert json.loads((tmp_path / "to/results.json").read_text())["a"]["rc"] == 0
    made = schedule.Schedule(JOBS, ["0"], tmp_path, {"work": "w"}, cpu=True)
    assert made._env(JOBS[0], ["0"])["PYTHONPATH"] == f"{ROOT}{os.pathsep}/elsewhere"
    with pytest.raises(SystemExit):
        schedule.main()
    assert "is of an earlier time" in capsys.readouterr().err


def test_jobs_have_gpus_of_their_own_and_outlive_a_failed_one(tmp_path: Path) -> None:
    """Two on one GPU ran out of memory; one that failed took those behind it along."""
    jobs = [
        schedule.Job("fails", gpus=2, seconds=20, argv="json.tool /nowhere"),
        schedule.Job("after it", seconds=20, argv="this", after=["fails"]),
        schedule.Job("one", seconds=20, argv="this"),
        schedule.Job("other", seconds=20, argv="this"),
        schedule.Job("too many", gpus=3, seconds=20, argv="this"),
    ]
    values = {"work": str(tmp_path / "work")}
    made = schedule.Schedule(jobs, ["4", "7"], tmp_path, values, cpu=True)
    made.run(60)
    found = {name: (told.get("rc"), told.get("gpus")) for name, told in made.results.items()}
    assert found["fails"] == (2, "4,7")
    assert {found["one"], found["other"]} == {(0, "4"), (0, "7")}
    assert found["after it"] == found["too many"] == (None, None)
    assert "No such file" in made.results["fails"]["tail"]
    assert "better than ugly" in (tmp_path / "logs.txt").read_text()
