"""The library: what it is made of comes late, its errors name the key, its notebook runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import launcher
from launcher import LauncherError, Run, RunFile, load_matrix
from launcher.base.settings import ROOT
from launcher.runs.runfile.config import Model
from tests.conftest import missing
from tests.runs.record_samples import several, steps

NOTEBOOK = ROOT / "docs/notebook.ipynb"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some records."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    several(tmp_path / "runs")
    return tmp_path / "runs"


def test_the_package_imports_nothing_before_it_is_asked() -> None:
    """Every command would begin later by what the library needs."""
    program = (
        "import sys; import launcher; assert launcher.__version__; found = {*sys.modules}\n"
        "assert not [m for m in found if m.startswith(('launcher.', 'pydantic', 'typing'))], found"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-S", "-c", program], env=environment, check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        launcher.nothing  # noqa: B018
    assert all(callable(getattr(launcher, name)) for name in launcher.__all__)
    assert (ROOT / "launcher/py.typed").is_file()


def test_a_run_file_is_made_loaded_and_changed(runs: Path) -> None:
    made = RunFile.new("a", "cpu", model=Model(num_layers=3), data={"mock": True}, gpus=0)
    assert (made.config.model.num_layers, made.config.gpus) == (3, "0")
    loaded = RunFile.load("gpt2-tiny.yaml", {"training.lr": 1e-3, "checkpoint.save": "out"})
    assert loaded.config.training.lr == 1e-3
    other = loaded.changed({"training.lr": 2e-3})
    assert (loaded.config.training.lr, other.config.training.lr) == (1e-3, 2e-3)
    assert other.config.checkpoint.save == "out"
    plan = other.plan("local").plan
    assert plan.argv[plan.argv.index("--lr") + 1] == "0.002"
    assert str(runs.parent / "out") in other.show("local")
    assert not (runs.parent / "out").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RunFile.new("a", "cpu", modle={}),
        lambda: RunFile.new("a", "cpu", model={"num_layer": 2}),
        lambda: RunFile.load("gpt2-tiny.yaml", {"model.num_layer": 2}),
        lambda: RunFile.load("gpt2-tiny.yaml").changed({"model.num_layers": 0}),
        lambda: RunFile.load("no-such"),
        lambda: RunFile.load("gpt2-tiny.yaml").plan("dokcer"),
        lambda: Run.find("no-such"),
        lambda: Run.all(since="a while"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_how_to_mend_it(wrong: Any, runs: Path) -> None:
    with pytest.raises(LauncherError) as caught:
        wrong()
    assert "model" in str(caught.value) or caught.value.remedy


def test_runs_are_found_with_what_was_kept_of_them(runs: Path) -> None:
    assert [run.id for run in Run.all("failed")] == ["cccc0001", "aaaa0001"]
    run = Run.find("gpt2-long")
    assert run.id == "aaaa0003"
    assert (run.state, run.summary.iteration) == ("finished", 2000)
    assert [step["iteration"] for step in run.metrics()] == [*range(1405, 2005, 5)]
    assert run.metrics("alarm")[0]["text"] == "rose"
    assert len(run.metrics("validation")) == 3
    assert (run.log(), run.record["name"]) == ("a log\n", "gpt2-long")
    assert run.checkpoints() == []
    assert run.explain().signs == []


def test_steps_come_as_they_are_kept_and_each_once(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart that goes over the same steps again would give them again."""
    log, alive = runs / "bbbb0001/metrics.jsonl", iter([None, None, None, 0])
    log.write_text("")
    later = iter([steps([10, 20]), steps([20, 30], attempt=1), []])

    def sleep(_: float) -> None:
        with log.open("a") as file:
            file.writelines(f"{json.dumps(one)}\n" for one in next(later))

    monkeypatch.setattr(launcher.api.time, "sleep", sleep)
    follower = SimpleNamespace(poll=lambda: next(alive))
    monkeypatch.setitem(launcher.api._followers, "bbbb0001", follower)
    assert [step["iteration"] for step in Run("bbbb0001").follow()] == [10, 20, 30]


def test_a_frame_is_pandas_own(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    frame: Any = Run("dddd0001").frame()
    assert frame[0]["iteration"] == 2
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(LauncherError, match="no pandas"):
        Run("dddd0001").frame()


def test_rows_are_those_of_the_matrix() -> None:
    assert "24.10" in load_matrix().rows


def test_the_notebook_holds_no_output_and_no_path() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    for cell in json.loads(text)["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None
    assert "/home" not in text
    assert "/root" not in text


@pytest.mark.megatron
@pytest.mark.skipif(bool(missing("torch", "megatron.core")), reason="there is no torch here")
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells in their order, but for those of packages that aren't here."""
    cells = [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code" and not missing(*cell["metadata"].get("tags", []))
    ]
    cells.append(
        "assert (run.state, longer.state, endless.state, broken.state) == "
        "('finished', 'finished', 'stopped', 'failed')\n"
        "assert [step['iteration'] for step in longer.metrics()] == [*range(41, 61)]\n"
    )
    own = {"PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(tmp_path / "runs")}
    own["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # whose python3 has torch
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(cells)],
        cwd=tmp_path,
        env=os.environ | own,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    assert "cause: " in found.stdout
