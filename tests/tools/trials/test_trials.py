"""What is in an image, and whether it trains."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.base.names import LABEL
from launcher.base.settings import ROOT
from launcher.images.matrix.matrix_file import load_matrix
from launcher.images.matrix.schema import Row
from launcher.runs.backends import backend
from launcher.runs.backends.docker.docker import DockerBackend
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.resolved import processes_of
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.values import parse_gpus
from launcher.tools.trials import image_probe, trials
from launcher.tools.trials.image_probe import Fact
from launcher.tools.trials.trials import TrialError, TrialPlace, TrialRun
from tests.e2e.command import launcher, refused
from tests.tools.conftest import Here

if TYPE_CHECKING:
    from collections.abc import Mapping

    from docker import DockerClient

    from tests.conftest import CpuImages

NOWHERE = TrialPlace(Path("/nowhere"), {"tag": "cpu"}, gpus=0, processes=2, seconds=1)


def test_what_an_image_has_not_is_not_tried() -> None:
    assert trials.attempt("entrypoint", NOWHERE, None).state == trials.SKIPPED
    for name in trials.UPSTREAMS:
        assert "sdist" in trials.attempt(name, NOWHERE, ImageFacts("0.16.1", False)).reason
    one = TrialPlace(Path("/nowhere"), {"tag": "24.10"}, gpus=1, processes=1, seconds=1)
    assert "two GPUs" in trials.attempt("quickstart", one, ImageFacts("0.9.0", True)).reason


def losses(*values: float) -> TrialRun:
    return TrialRun((), tuple({"kind": "validation", "loss": value} for value in values))


@pytest.mark.parametrize(
    ("runs", "problem"),
    [
        ([losses(5.0, 5.1)], "doesn't fall: [5.0, 5.1]"),
        ([losses(5.0)], "doesn't fall"),
        ([losses(5.0, 4.0), losses(4.0)], "the checkpoint wasn't loaded"),
    ],
)
def test_training_that_shows_nothing_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, runs: list[TrialRun], problem: str
) -> None:
    left = iter(runs)
    monkeypatch.setattr(TrialPlace, "run", lambda *_: next(left))
    found = trials.attempt("entrypoint", NOWHERE, ImageFacts("0.9.0", True))
    assert found.failed
    assert problem in found.reason


def test_upstreams_programs_have_to_show_what_they_did(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TrialPlace, "run", lambda *_: TrialRun(("step 1",), ()))
    at = TrialPlace(tmp_path, {"tag": "cpu"}, gpus=0, processes=2, seconds=1)
    for name in trials.UPSTREAMS:
        found = trials.attempt(name, at, ImageFacts("0.9.0", True))
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
    at = TrialPlace(tmp_path, {"tag": "24.10"}, gpus, 2, 1, devices=devices)
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

    def run(_: TrialPlace, __: str, config: Mapping[str, Any], ___: int) -> TrialRun:
        asked.update(config)
        return TrialRun((), ({"kind": "step", "iteration": 10},))

    monkeypatch.setattr(TrialPlace, "run", run)
    trials.pretrain_gpt(TrialPlace(Path("/nowhere"), {"tag": "24.10"}, gpus, 2, 1, fused=fused))
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
    assert trials.warnings([TrialRun(lines, ()), TrialRun(lines, ())]) == [
        "FutureWarning: `x` is deprecated since 2.1",
        "Warning: WARNING: not called",
        "UserWarning: other",
    ]


@pytest.fixture
def at(cpu_images: CpuImages, tmp_path: Path) -> TrialPlace:
    return TrialPlace(tmp_path, {"name": cpu_images.build()}, gpus=0, processes=2, seconds=600)


def held(at: TrialPlace) -> ImageFacts | None:
    return backend("docker").facts(at.image["name"])


@pytest.mark.engine
def test_a_run_that_takes_too_long_is_ended_and_leaves_nothing(
    engine: DockerClient, at: TrialPlace
) -> None:
    (at.folder / "sleep.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    tail = ""
    for seconds in (20, 200):  # a loaded machine needs longer than 20 s until the program prints
        began = time.monotonic()
        with pytest.raises(TrialError, match=f"longer than {seconds} s") as caught:
            TrialPlace(at.folder, at.image, 0, 1, seconds=seconds).run(
                "sleeps", {"program": "./sleep.py"}, 1
            )
        assert time.monotonic() - began < seconds + 280
        if "here" in (tail := caught.value.tail):
            break
    assert "here" in tail
    assert "sleeps" not in [job.labels[f"{LABEL}name"] for job in DockerBackend().jobs()]


@pytest.mark.engine
@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="MEGATRON_CHECKOUT isn't set")
@pytest.mark.parametrize("name", trials.UPSTREAMS)
def test_upstreams_own_programs_are_tried(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path, name: str
) -> None:
    image = cpu_images.build("0.9.0", Path(os.environ["MEGATRON_CHECKOUT"]))
    at = TrialPlace(tmp_path, {"name": image}, gpus=0, processes=2, seconds=600)
    found = trials.attempt(name, at, held(at))
    assert not found.failed, found


TEXT = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
ROWS = load_matrix().rows


def told(**values: str) -> dict[str, Fact]:
    return {name: Fact(value) for name, value in values.items()}


def test_versions_may_be_told_to_fewer_places() -> None:
    row = ROWS["24.10"]
    same = told(
        os="ubuntu 22.04",
        python="3.10.12",
        torch="2.5.0a0+e000cf0ad9.nv24.10",
        cuda="12.6.2.004",
        driver="560.35.03",
        cudnn="9.5.0.50",
    )
    assert image_probe.differences(row, same) == []
    assert image_probe.unstated(row, same) == {"cudnn": "9.5.0.50"}
    assert image_probe.differences(ROWS["24.03"], told(cuda="12.4.0.041")) == []  # of that image
    other = told(python="3.12.3", torch="2.5.0", cuda="12.60.2", driver="56")
    assert [line.partition(":")[0] for line in image_probe.differences(row, other)] == [
        *("python", "torch", "cuda", "driver")
    ]
    failed = {"cuda": Fact(error="OSError: no"), "nccl": Fact(error="OSError: no")}
    assert image_probe.differences(row, failed) == []
    assert image_probe.unstated(row, failed) == {}


@given(st.sampled_from(sorted(ROWS)), st.sets(st.sampled_from(image_probe.KEYS)))
def test_what_is_written_is_the_row_with_the_facts_and_no_other_byte(
    tag: str, keys: set[str]
) -> None:
    new = {key: f"1.{len(key)}" for key in keys if not getattr(ROWS[tag], key)}
    text = image_probe.written(TEXT, tag, new)
    lines = text.splitlines()
    assert [line for line in lines if line not in {f'    {k}: "{v}"' for k, v in new.items()}] == [
        *TEXT.splitlines()
    ]
    row = yaml.safe_load(text)["rows"][tag]
    assert {key: row[key] for key in new} == new
    stated = [key for key in Row.model_fields if key in row]
    assert [key for key in row if key in stated] == stated  # in the schema's order


def test_a_row_that_is_no_block_is_left_to_people() -> None:
    with pytest.raises(UsageError, match="by hand"):
        image_probe.written("rows:\n  a: {base: b}\n", "a", {"cuda": "1"})
    with pytest.raises(UsageError):
        image_probe.written("releases:\n  cpu:\n    git: x\nrows:\n", "cpu", {"cuda": "1"})


@pytest.mark.engine
def test_a_real_image_is_asked(engine: DockerClient, cpu_images: CpuImages) -> None:
    image = cpu_images.build()
    found = image_probe.ask_image(backend("docker"), {"name": image})
    assert found["torch"].value == "2.13.0+cpu"
    assert found["megatron_core"].value == "0.16.1"
    assert str(found["extension"].value).startswith("helpers_cpp.cpython-311-")
    assert any("Apex" in line for line in found["extension"].warnings)
    assert not [name for name, fact in found.items() if fact.error]
    assert image_probe.differences(ROWS["cpu"], found) == []


@pytest.mark.engine
def test_a_fact_that_ends_python_does_not_keep_the_others_from_being_told(
    engine: DockerClient, python_image: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = Path(image_probe.inside.__file__).read_text()
    crashing = tmp_path / "inside.py"
    crashing.write_text(text.replace('"""3.10.12."""', "os._exit(9)"))
    monkeypatch.setattr(image_probe.inside, "__file__", str(crashing))
    found = image_probe.ask_image(
        backend("docker"), {"name": python_image}, names=["os", "python", "torch"]
    )
    assert found["python"] == Fact(error="python3 ended with exit code 9")
    assert found["os"].value
    assert found["torch"] == Fact()


@pytest.mark.engine
def test_facts_are_written_into_a_matrix(
    engine: DockerClient, python_image: str, tmp_path: Path
) -> None:
    container = engine.containers.create(python_image, ["true"])
    env = ["CUDNN_VERSION=9.5.0.50", "NCCL_VERSION=2.22.3", "CUDA_VERSION=12.6.2.004"]
    image = container.commit("launchpad-test-facts", "1", conf={"Env": env})
    container.remove()
    matrix = tmp_path / "matrix.yaml"
    matrix.write_text(TEXT.replace(ROWS["24.10"].base, "launchpad-test-facts:1"))
    try:
        done = launcher(
            *("image", "probe", "24.10", "--base", "--write"), LAUNCHER_MATRIX=str(matrix)
        )
    finally:
        engine.images.remove(image.id)
    assert done.returncode == 1
    assert "python: the row says 3.10, and the image has 3.11" in done.stderr  # a stand-in
    assert "cuda: " not in done.stderr
    assert "matrix.yaml: cudnn: 9.5.0.50, nccl: 2.22.3" in done.stderr
    row = yaml.safe_load(matrix.read_text())["rows"]["24.10"]
    assert (row["cudnn"], row["nccl"]) == ("9.5.0.50", "2.22.3")


def test_what_makes_no_sense_is_told_at_once(here: Here) -> None:
    refused(here("image", "probe"), 2, "--backend local without one")
    refused(here("image", "probe", "--backend", "local", "--write"), 2, "no tag ''")
