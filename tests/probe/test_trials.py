"""Trials: what makes one fail, what isn't tried, and real ones in the CPU image."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.backends import backend
from launcher.backends.docker import DockerBackend
from launcher.probe import trials
from launcher.probe.trials import Place, Ran, TrialError, Verdict
from launcher.run.image import LABEL, Facts

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

NOWHERE = Place(Path("/nowhere"), {"tag": "cpu"}, gpus=0, processes=2, seconds=1)


def test_what_an_image_has_not_is_not_tried() -> None:
    assert trials.attempt("entrypoint", NOWHERE, None).state == trials.SKIPPED
    for name in trials.UPSTREAMS:
        assert "sdist" in trials.attempt(name, NOWHERE, Facts("0.16.1", False)).reason
    one = Place(Path("/nowhere"), {"tag": "24.10"}, gpus=1, processes=1, seconds=1)
    assert "two GPUs" in trials.attempt("quickstart", one, Facts("0.9.0", True)).reason


def losses(*values: float) -> Ran:
    return Ran((), tuple({"kind": "validation", "loss": value} for value in values))


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([losses(5.0, 5.1)], "doesn't fall: [5.0, 5.1]"),
        ([losses(5.0)], "doesn't fall"),
        ([losses(5.0, 4.0), losses(4.0)], "the checkpoint wasn't loaded"),
    ],
)
def test_training_that_shows_nothing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, runs: list[Ran], problem: str
) -> None:
    left = iter(runs)
    monkeypatch.setattr(Place, "run", lambda *_: next(left))
    found = trials.attempt("entrypoint", NOWHERE, Facts("0.9.0", True))
    assert found.failed
    assert problem in found.reason


def test_upstreams_programs_have_to_show_what_they_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Place, "run", lambda *_: Ran(("step 1",), ()))
    at = Place(tmp_path, {"tag": "cpu"}, gpus=0, processes=2, seconds=1)
    for name in trials.UPSTREAMS:
        found = trials.attempt(name, at, Facts("0.9.0", True))
        assert (found.failed, found.tail) == (True, ("step 1",))


def test_a_warning_is_told_once_whatever_its_numbers() -> None:
    lines = (
        "/opt/a.py:12: FutureWarning: `x` is deprecated since 2.1",
        "  warnings.warn(",
        "/opt/a.py:13: FutureWarning: `x` is deprecated since 2.3",
        "[rank1]:[W1122 ProcessGroupNCCL.cpp:1575] Warning: WARNING: not called",
        "UserWarning: other",
    )
    assert trials.warnings([Ran(lines, ()), Ran(lines, ())]) == [
        "FutureWarning: `x` is deprecated since 2.1",
        "Warning: WARNING: not called",
        "UserWarning: other",
    ]


@pytest.fixture
def at(cpu_images: CpuImages, tmp_path: Path) -> Place:
    return Place(tmp_path, {"name": cpu_images.build()}, gpus=0, processes=2, seconds=600)


def held(at: Place) -> Facts | None:
    return backend("docker").facts(at.image["name"])


@pytest.mark.engine
def test_our_program_learns_and_goes_on_in_one_process(engine: DockerClient, at: Place) -> None:
    assert trials.attempt("entrypoint", at, held(at)) == Verdict(trials.RUNS)


@pytest.mark.engine
def test_a_run_that_takes_too_long_is_ended_and_leaves_nothing(
    engine: DockerClient, at: Place
) -> None:
    (at.folder / "sleep.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(TrialError, match="longer than 8 s") as caught:
        Place(at.folder, at.image, 0, 1, seconds=8).run("sleeps", {"program": "./sleep.py"}, 1)
    assert time.monotonic() - began < 300
    assert "here" in caught.value.tail
    assert "sleeps" not in [job.labels[f"{LABEL}name"] for job in DockerBackend().jobs()]


@pytest.mark.engine
def test_a_run_that_fails_is_told_with_its_last_lines(engine: DockerClient, at: Place) -> None:
    (at.folder / "ends.py").write_text("import sys; print('no data'); sys.exit(3)")
    with pytest.raises(TrialError, match="ends: exit code 3") as caught:
        at.run("ends", {"program": "./ends.py"}, 1)
    assert "no data" in caught.value.tail


@pytest.mark.engine
@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="MEGATRON_CHECKOUT isn't set")
@pytest.mark.parametrize("name", trials.UPSTREAMS)
def test_upstreams_own_programs_are_tried(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path, name: str
) -> None:
    image = cpu_images.build("0.9.0", Path(os.environ["MEGATRON_CHECKOUT"]))
    at = Place(tmp_path, {"name": image}, gpus=0, processes=2, seconds=600)
    found = trials.attempt(name, at, held(at))
    assert not found.failed, found
