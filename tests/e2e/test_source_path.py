"""A git checkout of Megatron-LM given by MEGATRON_CHECKOUT: the whole of it, built and run."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.errors import PreflightError
from launcher.base.settings import ROOT
from launcher.images.builder import context
from launcher.images.matrix.matrix_file import load_matrix, patch_files
from launcher.images.matrix.schema import misfit
from launcher.runs.backends import backend
from launcher.runs.checks.machine import Machine
from launcher.runs.follow import ask_image
from launcher.runs.follow.assemble import assemble, new_stamp
from launcher.runs.runfile import origins
from launcher.runs.runfile.origins import RunRequest
from tests.e2e.command import in_image, launched, launcher
from tests.e2e.test_image import CALL_HELPERS

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

MATRIX = load_matrix()
FITTING = [v for v, r in MATRIX.releases.items() if misfit(MATRIX.rows["cpu"], v, r) is None]
CHECKOUT = os.environ.get("MEGATRON_CHECKOUT", "")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_CHECKOUT names no Megatron-LM repository"),
]


@pytest.fixture(scope="module")
def whole_image(cpu_images: CpuImages) -> str:
    """The cpu row with 0.9.0, from the checkout."""
    return cpu_images.build("0.9.0", Path(CHECKOUT))


def test_training_and_the_scripts_are_in_the_image(engine: DockerClient, whole_image: str) -> None:
    code = "import megatron.training; print(megatron.training.__file__)"
    assert "/opt/megatron/lib/megatron/training" in in_image(
        engine, whole_image, "python3", "-W", "ignore", "-c", code
    )
    found = in_image(engine, whole_image, "ls", "/opt/megatron/src").split()
    assert {"pretrain_gpt.py", "examples", "tools"} <= set(found)
    assert "megatron" not in found


def test_the_quickstart_trains_unchanged_on_the_cpu(whole_image: str, tmp_path: Path) -> None:
    done = launched(
        *("run", "simple.yaml", "--gpus", "0", "--set", f"image={whole_image}"),
        *("--set", f"resources.workdir={tmp_path}"),
    )
    assert done.stdout.count("Losses reduced") >= 5
    assert "Successfully loaded the model" in done.stdout


def test_the_image_is_asked_for_what_no_rule_here_knows(whole_image: str, tmp_path: Path) -> None:
    """It ended in validate_args, once every process had imported torch and Megatron."""
    upstreams = (
        "program=pretrain_gpt.py",
        "logging.check_replicas_interval=null",
        "model.transformer_impl=local",
        "megatron_args.no_persist_layer_norm=true",
        "megatron_args.no_gradient_accumulation_fusion=true",
    )
    wrong = (
        "megatron_args.moe_extended_tp=true",
        "megatron_args.moe_token_dispatcher_type=alltoall",
    )
    sets = [f"--set={one}" for one in (f"image={whole_image}", *upstreams, *wrong)]
    done = launcher("run", "gpt2-tiny.yaml", *sets)
    assert done.returncode == PreflightError.exit_code, done.stdout + done.stderr
    assert "Moe extended TP parallelism only applies to allgather based" in done.stderr
    sets = [f"image={whole_image}", *upstreams]
    config, origin = origins.load("gpt2-tiny.yaml", [origins.parse_set(one) for one in sets])
    plan = assemble(RunRequest(config, origin, str(tmp_path)), backend("docker"), new_stamp()).plan
    assert [*ask_image.ask_image(plan, Machine(), backend("docker"), tmp_path)] == []
    assert [one.read_text("utf-8") for one in (tmp_path / "asked").iterdir()] == ["{}"]


@pytest.mark.parametrize("megatron", FITTING)
def test_each_release_gives_a_wheel_of_all_of_megatron(
    engine: DockerClient, cpu_images: CpuImages, megatron: str
) -> None:
    name = cpu_images.build(megatron, Path(CHECKOUT))
    record = json.loads(in_image(engine, name, "cat", "/opt/megatron/build.json"))
    assert (record["release"], record["whole"]) == (megatron, True)
    packaged = in_image(engine, name, "ls", "/opt/megatron/lib/megatron").split()
    assert {"core", "training", "legacy"} <= set(packaged)
    assert "/opt/megatron/lib" in in_image(engine, name, "python3", "-c", CALL_HELPERS)


def test_a_checkout_of_another_patch_release_is_named_as_what_it_is(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path
) -> None:
    """core_v0.13.0 gave an image that said 0.13.1, with the hash of 0.13.0's wheel."""
    unpacked("core_v0.13.0", tmp_path)
    name = cpu_images.build(None, tmp_path)
    assert name.endswith(":cpu-0.13.0")
    labels = engine.images.get(name).labels
    assert labels["megatron-launchpad.megatron"] == "0.13.0"
    assert labels["megatron-launchpad.rules"] == "0.13.1"
    record = json.loads(in_image(engine, name, "cat", "/opt/megatron/build.json"))
    assert (record["release"], record["version"], record["rules"]) == ("0.13.0", "0.13.0", "0.13.1")
    assert record["wheel"]["name"].startswith("megatron_core-0.13.0-")


def unpacked(commit: str, folder: Path) -> None:
    """Write the tree of a commit of the repository to a folder."""
    archive = subprocess.run(
        ["git", "-C", CHECKOUT, "archive", commit], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive.stdout, check=True)


def test_every_release_s_patches_apply_to_its_git_tag(tmp_path: Path) -> None:
    for version, release in MATRIX.releases.items():
        if not release.git.is_named:
            continue
        tree = tmp_path / version
        tree.mkdir()
        unpacked(release.git.commit, tree)
        files = patch_files(ROOT, release)
        assert bool(files) == bool(release.patches)
        context.apply_patches(files, tree)
