"""A bundle of real inputs: where neither an index nor a registry is in reach, the same image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from docker import DockerClient

from launcher.build import bundle
from launcher.build.fetch import sha256
from launcher.engine.acquire import Bases
from launcher.engine.connect import engine_host
from launcher.settings import Settings
from tests.conftest import CpuImages

from .command import launcher, refused

pytestmark = pytest.mark.engine

NOWHERE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_NO_INDEX": "1",
    "LAUNCHER_TORCH_INDEX": "",
    "LAUNCHER_GIT_MIRROR": "file:///nowhere/",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}
"""What lets nothing be fetched: no index, no mirror, a proxy that isn't there."""


@pytest.fixture(scope="module")
def instead(bases: Bases) -> list[str]:
    """The options that name the base and the builder of these tests."""
    return ["--base", bases.base, "--builder", bases.builder]


@pytest.fixture(scope="module")
def packed(
    engine: DockerClient, instead: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The cpu row's inputs, images and all."""
    path = tmp_path_factory.mktemp("bundle") / "cpu.tar"
    done = launcher("fetch", "cpu", *instead, "--bundle", str(path))
    assert done.returncode == 0, done.stderr
    assert f"{path} " in done.stdout
    return path


def offline(cache: Path, client: DockerClient) -> dict[str, str]:
    return NOWHERE | {"LAUNCHER_CACHE": str(cache), "DOCKER_HOST": engine_host(client)}


def test_the_same_image_is_built_where_nothing_can_be_fetched(
    engine: DockerClient,
    other_engine: DockerClient,
    cpu_images: CpuImages,
    packed: Path,
    instead: list[str],
    tmp_path: Path,
) -> None:
    here = engine.api.inspect_image(cpu_images.build())
    environment = offline(tmp_path / "cache", other_engine)
    done = launcher("image", "build", "cpu", *instead, **environment)
    refused(done, 122 if "pip can't" in done.stderr else 125)  # neither package nor base is there

    taken = launcher("fetch", "--from", str(packed), **environment)
    assert taken.returncode == 0, taken.stderr
    assert taken.stdout.startswith("cpu: ")
    built = launcher("image", "build", "cpu", *instead, **environment)
    assert built.returncode == 0, built.stderr
    assert " built" in built.stdout

    there = other_engine.api.inspect_image("megatron:cpu")
    for part in ("Config", "RootFS", "Architecture", "Os"):
        assert there[part] == here[part]
    if there["Created"] == here["Created"]:  # Docker 20.10 writes the time of the build there
        assert there["Id"] == here["Id"]


def test_packing_again_gives_the_same_bytes(
    packed: Path, instead: list[str], engine: DockerClient, site: Settings, tmp_path: Path
) -> None:
    again = tmp_path / "again.tar"
    environment = offline(tmp_path / "cache", engine)
    taken = launcher("fetch", "--from", str(packed), **environment)
    assert taken.returncode == 0, taken.stderr
    done = launcher("fetch", "cpu", *instead, "--bundle", str(again), **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == f"sha256:{sha256(packed)}"


def test_a_flipped_byte_in_each_kind_of_member_is_named_and_nothing_is_taken(
    packed: Path, engine: DockerClient, tmp_path: Path
) -> None:
    index = bundle.check(packed)
    places = bundle._places(index)
    image = index.images[0].parts[-1]
    for path in (index.files[0], index.files[-1], image):
        at = places[path][0]
        with packed.open("r+b") as file:
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 16]))
        try:
            cache = tmp_path / "cache"
            done = launcher("fetch", "--from", str(packed), **offline(cache, engine))
        finally:
            with packed.open("r+b") as file:
                file.seek(at)
                file.write(bytes([byte]))
        refused(done, 2, "damaged, and nothing was taken", f"\n  {path}\n")
        assert not cache.exists()
    assert bundle.check(packed) == index


def test_a_row_from_git_is_carried_with_its_source(
    engine: DockerClient, site: Settings, tmp_path: Path
) -> None:
    at = os.environ.get("MEGATRON_CHECKOUT")
    if not at:
        pytest.skip("MEGATRON_CHECKOUT names no Megatron-LM repository to take a release from")
    mirror = tmp_path / "mirror/NVIDIA"
    mirror.mkdir(parents=True)
    (mirror / "Megatron-LM.git").symlink_to(Path(at).resolve())
    path = tmp_path / "git.tar"
    row = ["fetch", "24.10", "--no-images"]
    environment = {
        "LAUNCHER_CACHE": str(tmp_path / "first"),
        "LAUNCHER_GIT_MIRROR": f"file://{mirror.parent}/",
    }
    (tmp_path / "first").mkdir()
    (tmp_path / "first/sha256").symlink_to(site.cache / "sha256")
    done = launcher(*row, "--bundle", str(path), **environment)
    assert done.returncode == 0, done.stderr
    there = offline(tmp_path / "second", engine)
    refused(launcher(*row, **there), 122)
    taken = launcher("fetch", "--from", str(path), **there)
    assert taken.returncode == 0, taken.stderr
    assert "1 git sources" in taken.stdout
    done = launcher(*row, **there)
    assert done.returncode == 0, done.stderr
