"""Real builds with a real engine: what is in an image, what is refused, what is shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.errors import BuildError, EngineError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.matrix.load import load_matrix
from launcher.images.matrix.schema import misfit
from launcher.images.sources import source
from tests.conftest import NAMES
from tests.e2e.command import in_image, launcher, layers, matrix_folder, refused, standin, tarred

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


def test_the_base_keeps_its_entrypoint_and_gains_a_path(
    engine: DockerClient, cpu_images: CpuImages
) -> None:
    config = engine.api.inspect_image(cpu_images.build())["Config"]
    assert not config["Entrypoint"]
    assert "PYTHONPATH=/opt/megatron/lib:/opt/packages/lib" in config["Env"]
    labels = config["Labels"]
    assert labels["megatron-launchpad.row"] == "cpu"
    assert labels["megatron-launchpad.megatron"] == load_matrix().rows["cpu"].megatron


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


def test_a_base_that_cannot_be_pulled_is_refused(engine: DockerClient, site: Settings) -> None:
    builds = Builds(engine, site, Progress(), NAMES)
    with pytest.raises(EngineError, match="can't be reached"):
        builds.build(BuildRequest("cpu", base="registry.invalid/none:1"))


@pytest.fixture
def builds(engine: DockerClient, site: Settings) -> Builds:
    return Builds(engine, site, Progress(), NAMES)


@pytest.fixture
def edited(builds: Builds, bases: BaseNames, tmp_path: Path) -> BuildRequest:
    """A build of a source of 0.12.3, to be changed."""
    source.locked(builds.recipe(BuildRequest("cpu", "0.12.3")), builds.site).unpack(
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
