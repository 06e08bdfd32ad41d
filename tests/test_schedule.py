"""bench.gpu.schedule: its list of jobs, and where they start."""

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
from launcher.runs.runfile.source import PRESETS

JOBS = schedule.load(ROOT / "bench/gpu/jobs.yaml", [])


def test_what_the_jobs_start_is_there() -> None:
    """A module that had moved was seen on a machine with GPUs, minutes after the start."""
    names = [job.name for job in JOBS]
    assert len({*names}) == len(names)
    for job in JOBS:
        assert {*job.after} <= {*names}
        if job.argv:
            assert find_spec(shlex.split(job.argv)[0]), job.argv
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
