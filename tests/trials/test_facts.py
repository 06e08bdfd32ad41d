"""Facts against a row of the matrix, and as a matrix's text gets them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends import backend
from launcher.errors import UsageError
from launcher.matrix.load import load_matrix
from launcher.matrix.schema import Row
from launcher.settings import ROOT
from launcher.trials import facts
from launcher.trials.facts import Fact
from tests.e2e.command import launcher, refused

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

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
    assert facts.differences(row, same) == []
    assert facts.unstated(row, same) == {"cudnn": "9.5.0.50"}
    assert facts.differences(ROWS["24.03"], told(cuda="12.4.0.041")) == []  # of that image
    other = told(python="3.12.3", torch="2.5.0", cuda="12.60.2", driver="56")
    assert [line.partition(":")[0] for line in facts.differences(row, other)] == [
        *("python", "torch", "cuda", "driver")
    ]
    failed = {"cuda": Fact(error="OSError: no"), "nccl": Fact(error="OSError: no")}
    assert facts.differences(row, failed) == []
    assert facts.unstated(row, failed) == {}


@given(st.sampled_from(sorted(ROWS)), st.sets(st.sampled_from(facts.KEYS)))
def test_what_is_written_is_the_row_with_the_facts_and_no_other_byte(
    tag: str, keys: set[str]
) -> None:
    new = {key: f"1.{len(key)}" for key in keys if not getattr(ROWS[tag], key)}
    text = facts.written(TEXT, tag, new)
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
        facts.written("rows:\n  a: {base: b}\n", "a", {"cuda": "1"})
    with pytest.raises(UsageError):
        facts.written("releases:\n  cpu:\n    git: x\nrows:\n", "cpu", {"cuda": "1"})


@pytest.mark.engine
def test_a_real_image_is_asked(engine: DockerClient, cpu_images: CpuImages) -> None:
    image = cpu_images.build()
    found = facts.ask_image(backend("docker"), {"name": image})
    assert found["torch"].value == "2.13.0+cpu"
    assert found["megatron_core"].value == "0.16.1"
    assert str(found["extension"].value).startswith("helpers_cpp.cpython-311-")
    assert any("Apex" in line for line in found["extension"].warnings)
    assert not [name for name, fact in found.items() if fact.error]
    assert facts.differences(ROWS["cpu"], found) == []


@pytest.mark.engine
def test_a_fact_that_ends_python_does_not_keep_the_others_from_being_told(
    engine: DockerClient, python_image: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = Path(facts.inside.__file__).read_text()
    crashing = tmp_path / "inside.py"
    crashing.write_text(text.replace('"""3.10.12."""', "os._exit(9)"))
    monkeypatch.setattr(facts.inside, "__file__", str(crashing))
    found = facts.ask_image(
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


def test_what_makes_no_sense_is_told_at_once() -> None:
    for wrong in ((), ("cpu", "--backend", "local")):
        refused(launcher("image", "probe", *wrong), 2, "--backend local without one")
    refused(launcher("image", "probe", "--backend", "local", "--write"), 2, "no tag ''")
    done = launcher("image", "probe", "cpu", "--limit", "nan")
    assert (done.returncode, done.stderr.count("isn't a number above 0")) == (2, 1)
