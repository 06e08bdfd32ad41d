"""Real builds with a real engine: what is in an image and beside it, what is refused or shared.

And builds that are killed: the next one succeeds, and nothing damaged is ever used.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.base.errors import BuildError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.builder import beside
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.matrix.matrix_file import load_matrix
from launcher.images.matrix.schema import misfit
from launcher.images.sources import fetch, megatron_source
from tests.conftest import NAMES
from tests.e2e.command import (
    BUILD,
    base_with,
    in_image,
    killed,
    launched,
    launcher,
    layers,
    matrix_folder,
    refused,
    standin,
    tarred,
)
from tests.e2e.site import Site
from tests.images.builder import test_attest as documents

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames
    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

CPU = load_matrix().rows["cpu"]
SDISTS = [
    version
    for version, release in load_matrix().releases.items()
    if release.sdist and not misfit(CPU, version, release)
]
DEFAULT = CPU.megatron
# Imports what the patch changed and calls it: with the extension there, no make is run.
CALL_HELPERS = "from megatron.core.datasets.utils import compile_helpers; compile_helpers(); \
import megatron.core.datasets.helpers as h; print(h.__file__)"


@pytest.mark.parametrize(
    "megatron",
    [pytest.param(one, marks=[pytest.mark.long] if one != DEFAULT else []) for one in SDISTS],
)
def test_each_release_gives_a_wheel_with_its_extension(
    engine: DockerClient, cpu_images: CpuImages, megatron: str
) -> None:
    name = cpu_images.build(megatron)
    record = json.loads(in_image(engine, name, "cat", "/opt/megatron/build.json"))
    assert record["release"] == megatron
    assert record["wheel"]["name"] == f"megatron_core-{megatron}-cp311-cp311-linux_x86_64.whl"
    assert set(record["patches"]) >= {"02-precompiled-helpers.patch"}
    assert "/opt/megatron/lib" in in_image(engine, name, "python3", "-c", CALL_HELPERS)


def test_what_is_added_is_one_layer_of_normalised_files_under_40_mb(
    engine: DockerClient, cpu_images: CpuImages, python_image: str
) -> None:
    name = cpu_images.build()
    base = layers(engine, python_image)
    assert layers(engine, name)[: len(base)] == base
    assert len(layers(engine, name)) == len(base) + 2  # that of the row's packages, and ours
    found = in_image(
        engine, name, "find", "/opt/megatron", "-printf", "%T@ %U:%G %m %y %s %P\n"
    ).splitlines()
    rows = [line.split(" ", 5) for line in found]
    paths = [row[5] for row in rows]
    assert sorted(paths) == sorted(paths, key=lambda path: path.split("/"))  # however it is sorted
    assert len({row[0] for row in rows}) == 1
    assert {row[1] for row in rows} == {"0:0"}
    assert {(row[2], row[3]) for row in rows} <= {("755", "d"), ("644", "f"), ("755", "f")}
    own = [row for row in rows if row[5].startswith(("lib/megatron", "lib/launcher", "src"))]
    assert sum(int(row[4]) for row in own) < 40e6
    assert not [row for row in rows if row[5].endswith(".o")]


@pytest.mark.long
def test_nine_rows_on_nine_bases_compile_once(
    engine: DockerClient,
    site: Settings,
    bases: BaseNames,
    python_image: str,
    tmp_path: Path,
) -> None:
    """Stand-ins for the NGC bases: the nine rows with this base's Python, and 0.10.0's sdist."""
    tags = load_matrix().usual
    change = {"python": "3.11", "megatron": "0.10.0", "source": "sdist"}
    path = matrix_folder(
        tmp_path,
        {tag: {**change, "base": standin(engine, python_image, tag)} for tag in tags},
    )
    builds = Builds(
        engine,
        Settings(site.cache, path, "", "", site.runs, site.extras),
        Progress(),
        "launchpad-test-rows",
    )
    built = [builds.build(BuildRequest(tag, builder=bases.builder)) for tag in tags]
    assert len({one.id for one in built}) == len(tags) == 9
    assert len({layers(engine, one.id)[-1] for one in built}) == 1
    assert all(builds.build(BuildRequest(tag, builder=bases.builder)).reused for tag in tags)
    for tag in tags:
        engine.images.remove(f"launchpad-test-rows:{tag}-0.10.0", force=True)
        engine.images.remove(f"launchpad-test-rows:{tag}", force=True)
        engine.images.remove(f"launchpad-test:{tag}", force=True)


def test_a_base_without_python_is_refused_by_name_and_leaves_no_container(
    engine: DockerClient, bases: BaseNames
) -> None:
    engine.api.import_image_from_data(tarred({}), "launchpad-test-empty", "1")
    done = launcher(
        *("image", "build", "cpu", "--base", "launchpad-test-empty:1"),
        *("--builder", bases.builder),
    )
    refused(done, 122, "launchpad-test-empty:1: python3 doesn't run in it")
    left = engine.containers.list(all=True, filters={"ancestor": "launchpad-test-empty:1"})
    engine.images.remove("launchpad-test-empty:1", force=True)
    assert not left


@pytest.fixture
def builds(engine: DockerClient, site: Settings) -> Builds:
    return Builds(engine, site, Progress(), NAMES)


@pytest.fixture
def edited(builds: Builds, bases: BaseNames, tmp_path: Path) -> BuildRequest:
    """A build of a source of 0.12.3, to be changed."""
    megatron_source.locked(builds.recipe(BuildRequest("cpu", "0.12.3")), builds.site).unpack(
        tmp_path / "edited"
    )
    return BuildRequest("cpu", "0.12.3", tmp_path / "edited", bases.base, bases.builder)


def test_a_compiler_error_fails_the_build_with_its_lines_and_leaves_no_tag(
    engine: DockerClient, builds: Builds, edited: BuildRequest
) -> None:
    """From 0.10 on a broken compiler still gives a wheel, with no extension in it."""
    assert edited.checkout
    (edited.checkout / "megatron/core/datasets/helpers.cpp").write_text("not C++\n")
    before = {name for found in engine.images.list(NAMES) for name in found.tags}
    with pytest.raises(BuildError) as caught:
        builds.build(edited)
    assert "holds no compiled megatron.core.datasets.helpers_cpp" in str(caught.value)
    assert {name for found in engine.images.list(NAMES) for name in found.tags} == before


def inspected(name: str, **env: str) -> dict[str, Any]:
    """What `image inspect --json` prints."""
    done = launched("image", "inspect", name, "--json", **env)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_image_is_documented_and_inspect_reads_it_back(
    engine: DockerClient, site: Settings, image: str
) -> None:
    found = inspected(image)
    assert found["id"] == engine.api.inspect_image(image)["Id"]
    assert image in found["names"]
    short = found["id"].removeprefix("sha256:")[:12]  # as `image build` prints it
    assert inspected(short) == found
    documents.validated(found["provenance"])
    subjects = {one["name"]: one["digest"]["sha256"] for one in found["provenance"]["subject"]}
    wheel = found["build"]["wheel"]
    assert subjects == {
        "megatron:cpu-0.16.1": found["id"].removeprefix("sha256:"),
        wheel["name"]: wheel["sha256"],
    }
    documents.check((beside.folder(found["id"], site) / beside.SBOM).read_text())
    listed = {one["purl"] for one in found["sbom"]["components"]}
    assert {"pkg:pypi/torch@2.13.0%2Bcpu", "pkg:pypi/megatron-core@0.16.1"} <= listed


def test_the_lists_hold_exactly_what_was_installed(engine: DockerClient, image: str) -> None:
    """The metadata of every package that the image has in our folders, against the SBOM."""
    listing = "ls -d /opt/megatron/lib/*.dist-info /opt/packages/lib/*.dist-info"
    printed = in_image(engine, image, "sh", "-c", listing)
    stems = {Path(line).name.removesuffix(".dist-info") for line in printed.split()}
    there = {tuple(stem.lower().replace("_", "-").rsplit("-", 1)) for stem in stems}
    sbom = inspected(image)["sbom"]["components"]
    listed = {
        (one["name"].lower().replace("_", "-"), one["version"])
        for one in sbom
        if one["purl"].startswith("pkg:pypi/")
    }
    assert there == listed


def test_what_is_not_on_this_machine_is_said_and_not_made(image: str, tmp_path: Path) -> None:
    done = launched("image", "inspect", image, LAUNCHER_CACHE=str(tmp_path))
    assert done.stdout.count("not on this machine") == 2
    assert "org.opencontainers.image.title" in done.stdout
    assert inspected(image, LAUNCHER_CACHE=str(tmp_path))["sbom"] is None
    assert not list(tmp_path.iterdir())


def test_an_image_that_is_not_ours_or_not_there_is_refused(python_image: str) -> None:
    refused(launcher("image", "inspect", python_image), 2, python_image, "/opt/megatron/build.json")
    refused(launcher("image", "inspect", f"{NAMES}:none"), 125, f"{NAMES}:none")


def test_a_base_with_an_older_resiliency_ext_is_refused_before_anything_is_compiled(
    engine: DockerClient, site: Settings, python_image: str, bases: BaseNames, tmp_path: Path
) -> None:
    """Such an image was built, and each run in it ended at its first import."""
    row = {"python": "3.11", "megatron": "0.10.0", "source": "sdist"}
    path = matrix_folder(tmp_path, {"24.10": row})
    data = yaml.safe_load(path.read_text())
    data["releases"]["0.10.0"]["needs_base"] = needed = data["releases"]["0.19.0"]["needs_base"]
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    assert needed
    builds = Builds(engine, replace(site, matrix=path), Progress(), f"{NAMES}-needs")
    base = base_with(engine, python_image, "nvidia-resiliency-ext", "0.5.0")
    instead = ("--base", base, "--builder", bases.builder)
    done = launcher("image", "build", "24.10", *instead, LAUNCHER_MATRIX=str(path))
    refused(done, 122, f"{base}: has nvidia-resiliency-ext 0.5.0", ">=0.6.0")
    assert "build [" not in done.stderr
    base = base_with(engine, python_image, "nvidia-resiliency-ext", "0.6.0")
    image = builds.build(BuildRequest("24.10", base=base, builder=bases.builder)).id
    listed = beside.packages(image, builds.site) or {}
    assert listed["nvidia-resiliency-ext"] == "0.6.0"
    assert "megatron-core" in listed
    engine.images.remove(image, force=True)


RUN = """\
name: needs
image: {name: %s}
gpus: 0
program: gpt
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, seq_length: 16,
  max_position_embeddings: 16}
training: {micro_batch_size: 2, global_batch_size: 2, train_iters: 2, lr: 1.0e-3}
data: {mock: true, vocab_size: 100}
logging: {log_interval: 1, tensorboard_dir: board}
"""


def test_an_option_whose_package_the_image_has_starts_and_one_without_is_refused(
    here: Site, image: str
) -> None:
    """The CPU row has tensorboard and no wandb."""
    (here.folder / "run.yaml").write_text(RUN % image)
    assert here.start("run", "run.yaml", "--dry-run").ends() == 0  # and test_trained starts one
    more = ("--set", "logging.wandb_project=p", "--set", "logging.wandb_exp_name=e")
    for dry in ([], ["--dry-run"]):
        done = here.start("run", "run.yaml", *more, *dry)
        assert done.ends() == 121
        said = done.err
        assert "needs the Python package wandb, which isn't in" in said
        assert "pip install wandb" in said
    unknown = here.start(
        "run",
        "run.yaml",
        *more,
        "--set",
        "env.PYTHONPATH=/mine:/opt/megatron/lib:/opt/packages/lib",
    )
    assert unknown.ends() == 121
    assert "python3 has no wandb: " in repr(unknown)


TIMES = 10
LATEST = 12.0  # seconds: it is compiling by then


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ten_builds_that_are_killed_harm_none_that_follows(
    engine: DockerClient, site: Settings, bases: BaseNames, cpu_images: CpuImages, tmp_path: Path
) -> None:
    built = engine.api.inspect_image(cpu_images.build())["Id"]
    cache = tmp_path / "cache"
    shutil.copytree(site.cache / "sha256", cache / "sha256", copy_function=os.link)
    files = sorted((cache / "sha256").glob("*/[!.]*"))
    for path in [path for path in files if path.stat().st_size < 5e6][::3]:
        path.unlink()  # some have to be fetched as well
    command = ["-c", BUILD, bases.base, bases.builder, NAMES]
    environment = {"LAUNCHER_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    drawn = random.Random(0)  # noqa: S311
    waits = [LATEST * (number + drawn.random()) / TIMES for number in range(TIMES)]
    assert all([killed(command, wait, **environment) for wait in waits])
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.strip()) == (0, built), done.stderr
    files = [path for path in (cache / "sha256").glob("*/[!.]*") if path.is_file()]
    assert files
    assert [path for path in files if fetch.sha256(path) != path.parent.name] == []
