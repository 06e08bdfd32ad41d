"""The text that asks an image for its facts, run by this Python as an image's would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.trials import inside

TEXT = Path(inside.__file__).read_text(encoding="utf-8")


def tell(*names: str, folder: Path | None = None, **env: str) -> dict[str, dict[str, object]]:
    """What the text prints for `names`, by name; `folder` holds the packages there are."""
    path = {"PYTHONPATH": str(folder)} if folder else {}
    done = subprocess.run(
        [sys.executable, "-c", TEXT, *names],
        env={"PATH": os.environ["PATH"]} | path | env,
        capture_output=True,
        text=True,
        check=True,
    )
    return {one["name"]: one for one in map(json.loads, done.stdout.splitlines())}


def package(folder: Path, name: str, version: str, text: str = "") -> None:
    """Install a package of one module."""
    module = folder / name / "__init__.py"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(text)
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_every_fact_is_told_where_there_is_nothing_but_python() -> None:
    told = tell(*inside.FACTS)
    assert list(told) == list(inside.FACTS)
    assert told["python"]["value"] == "{}.{}.{}".format(*sys.version_info[:3])
    assert str(told["os"]["value"]).count(" ") == 1
    absent = [name for name, one in told.items() if one.get("value") is None]
    assert not [name for name in absent if "error" in told[name]]


def test_the_images_own_variables_are_taken_first() -> None:
    env = {
        "CUDA_VERSION": "12.6.2.004",
        "CUDA_DRIVER_VERSION": "560.35.03",
        "CUDNN_VERSION": "9.5.0.50",
        "NCCL_VERSION": "2.22.3",
    }
    told = tell("cuda", "driver", "cudnn", "nccl", **env)
    assert [one["value"] for one in told.values()] == [*env.values()]
    told = tell("cudnn", "nccl", CUDNN_VERSION="9.0.0.306+cuda12.3", NCCL_VERSION="2.20.5-1")
    assert [one["value"] for one in told.values()] == ["9.0.0.306", "2.20.5"]


TORCH = """\
import sys, types, warnings
version = types.SimpleNamespace(cuda="12.4")
def made(name, **what):
    module = sys.modules[name] = types.ModuleType(name)
    module.__dict__.update(what)
made("torch.backends")
made("torch.backends.cudnn", version=lambda: {cudnn})
made("torch.cuda", device_count=lambda: 3, get_device_name=lambda n: "AB B".split()[n % 2])
made("torch.cuda.nccl", version=lambda: (2, 21, 5))
print("hello")
warnings.warn("old")
warnings.warn("old")
"""


@pytest.mark.parametrize(("number", "told"), [(90300, "9.3.0"), (8907, "8.9.7")])
def test_else_torch_is_asked(tmp_path: Path, number: int, told: str) -> None:
    package(tmp_path, "torch", "2.4.0a0+f70bd71a48", TORCH.replace("{cudnn}", str(number)))
    found = tell("torch", "cuda", "cudnn", "nccl", "gpus", folder=tmp_path)
    assert [one["value"] for one in found.values()] == [
        "2.4.0a0+f70bd71a48",
        "12.4",
        told,
        "2.21.5",
        "2 × AB, 1 × B",
    ]
    assert found["cuda"]["warnings"] == ["UserWarning: old"]


@pytest.mark.parametrize("library", ["nccl", "cudnn"])
def test_a_library_that_torch_brings_is_asked_of_torch_and_the_other_of_the_image(
    tmp_path: Path, library: str
) -> None:
    package(tmp_path, "torch", "2.5.1", TORCH.replace("{cudnn}", "90300"))
    (tmp_path / "nvidia" / library / "lib").mkdir(parents=True)
    env = {"NCCL_VERSION": "2.16.2-1", "CUDNN_VERSION": "9.8.0.87-1"}
    of_image, of_torch = (
        {"nccl": "2.16.2", "cudnn": "9.8.0.87"},
        {"nccl": "2.21.5", "cudnn": "9.3.0"},
    )
    told = tell("nccl", "cudnn", folder=tmp_path, **env)
    assert {name: one["value"] for name, one in told.items()} == {
        **of_image,
        library: of_torch[library],
    }


def test_a_package_that_fails_is_told_in_a_line(tmp_path: Path) -> None:
    package(tmp_path, "torch", "2.4.0", "raise OSError('libcudart.so.12: cannot open')")
    stated = {"NCCL_VERSION": "2.16.2-1", "CUDNN_VERSION": "9.8.0"}
    found = tell("cuda", "python", "nccl", "cudnn", folder=tmp_path, **stated)
    assert found["cuda"]["error"] == "OSError: libcudart.so.12: cannot open"
    assert "error" not in found["python"]
    assert [found[name]["value"] for name in ("nccl", "cudnn")] == ["2.16.2", "9.8.0"]


def test_a_fact_finds_the_programs_that_the_extension_did_without(tmp_path: Path) -> None:
    package(tmp_path, "megatron_core", "0.16.1")
    for name in ("megatron/core/datasets", "megatron/training"):
        (tmp_path / name).mkdir(parents=True)
    says = "import os; print(*map(os.environ.get, ('PATH', 'CC', 'CXX')), file=open({!r}, 'w'))"
    said = {name: tmp_path / name for name in ("helpers", "training")}
    (tmp_path / "megatron/core/datasets/helpers.py").write_text(says.format(str(said["helpers"])))
    (tmp_path / "megatron/training/__init__.py").write_text(says.format(str(said["training"])))
    found = tell("extension", "training", folder=tmp_path, CC="gcc-12")
    assert "error" in found["extension"]
    assert found["training"]["value"] == "megatron.training"
    assert said["helpers"].read_text() == " None None\n"
    assert said["training"].read_text() == f"{os.environ['PATH']} gcc-12 None\n"


def test_helpers_that_are_not_compiled_are_no_extension(tmp_path: Path) -> None:
    package(tmp_path, "megatron_core", "0.16.1")
    folder = tmp_path / "megatron/core/datasets"
    folder.mkdir(parents=True)
    (folder / "helpers.py").write_text("")
    found = tell("extension", folder=tmp_path)
    assert "No module named 'megatron.core.datasets.helpers_cpp'" in str(
        found["extension"]["error"]
    )
