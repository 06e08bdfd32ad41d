"""Trials: what makes one fail, what isn't tried, and real ones in the CPU image."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.backends import backend
from launcher.backends.docker import DockerBackend
from launcher.names import LABEL
from launcher.plan.config import RunConfig
from launcher.plan.image import Facts
from launcher.plan.plan import processes_of
from launcher.plan.values import parse_gpus
from launcher.trials import trials
from launcher.trials.trials import Place, Ran, TrialError

if TYPE_CHECKING:
    from collections.abc import Mapping

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


CORE = "/opt/megatron/lib/megatron/core/dist_checkpointing"
TRACEBACK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "gpt_layer_specs.py", line 222, in get_gpt_layer_spec
[rank0]: NameError: name 'TESpecProvider' is not defined
[rank1]: NameError: name 'TESpecProvider' is not defined
Exception raised from recvBytes at c10d/Utils.hpp:682 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d
[rank1]:[W1122 ProcessGroupNCCL.cpp:1575] Warning: WARNING: not called
runner: rank 0 exited with code 1
""".splitlines()


def test_a_failure_is_told_with_the_exception_and_not_with_what_peers_say_after_it() -> None:
    told = trials.failure("pretrain-gpt: exit code 1", TRACEBACK)
    assert told.problem.endswith("code 1: NameError: name 'TESpecProvider' is not defined")
    assert list(told.tail) == TRACEBACK[:4]
    assert told.stage == trials.TRAIN
    saving = ["  File x.py, line 3, in save_checkpoint", "OSError: [Errno 28] No space left"]
    assert trials.failure("a", saving).stage == trials.CHECKPOINT
    loading = f'[rank0]:   File "{CORE}/strategies/torch.py", line 9, in load'
    assert trials.failure("a", [loading]).stage == trials.CHECKPOINT
    importing = f'  File "{CORE}/strategies/torch.py", line 17, in <module>'
    warning = f"{CORE}/strategies/torch.py:17: DeprecationWarning: _sharded_tensor will be"
    assert trials.failure("a", [importing, warning, "ImportError: x"]).stage == trials.TRAIN
    assert trials.failure("a", ["one", "two"]).tail == ("one", "two")


@pytest.mark.parametrize(
    ("gpus", "devices", "processes", "asked"),
    [
        (2, (), 2, "2"),
        (2, ("2", "3"), 2, "device=2,3"),
        (2, ("2", "3"), 1, "device=2"),
        (0, (), 2, "0"),
    ],
)
def test_the_gpus_that_were_named_are_trained_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: int,
    devices: tuple[str, ...],
    processes: int,
    asked: str,
) -> None:
    monkeypatch.setattr(trials.sys, "executable", "true")
    at = Place(tmp_path, {"tag": "24.10"}, gpus, 2, 1, devices=devices)
    at.run("a", {"program": "pretrain_gpt.py"}, processes)
    values = yaml.safe_load((tmp_path / "a.yaml").read_text(encoding="utf-8"))
    config = RunConfig.model_validate(values)
    assert config.gpus == asked
    assert processes_of(config, parse_gpus(config.gpus)) == processes


@pytest.mark.parametrize(
    ("gpus", "fused", "local", "on_cpu"),
    [(0, True, True, True), (2, False, True, False), (2, True, False, False)],
)
def test_upstreams_program_is_asked_for_what_is_there(
    monkeypatch: pytest.MonkeyPatch, gpus: int, fused: bool, local: bool, on_cpu: bool
) -> None:
    asked: dict[str, Any] = {}

    def run(_: Place, __: str, config: Mapping[str, Any], ___: int) -> Ran:
        asked.update(config)
        return Ran((), ({"kind": "step", "iteration": 10},))

    monkeypatch.setattr(Place, "run", run)
    trials.pretrain_gpt(Place(Path("/nowhere"), {"tag": "24.10"}, gpus, 2, 1, fused=fused))
    assert (asked["model"].get("transformer_impl") == "local") == local
    assert ("clip_grad" in asked["training"]) == on_cpu
    assert bool(asked.get("megatron_args", {}).get("use_cpu_initialization")) == on_cpu


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
@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="MEGATRON_CHECKOUT isn't set")
@pytest.mark.parametrize("name", trials.UPSTREAMS)
def test_upstreams_own_programs_are_tried(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path, name: str
) -> None:
    image = cpu_images.build("0.9.0", Path(os.environ["MEGATRON_CHECKOUT"]))
    at = Place(tmp_path, {"name": image}, gpus=0, processes=2, seconds=600)
    found = trials.attempt(name, at, held(at))
    assert not found.failed, found
