"""A bundle of real inputs: where neither an index nor a registry is in reach, the same image."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from docker import DockerClient

from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.engine.connect import engine_host
from tests.e2e.command import launcher, refused
from tests.e2e.conftest import Small

QUIET = Progress(open(os.devnull, "w"))  # noqa: SIM115

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
def packed(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small row's inputs, images and all."""
    path = tmp_path_factory.mktemp("bundle") / "small"
    done = launcher("fetch", "24.10", *small.instead, "--bundle", str(path), **small.env)
    assert done.returncode == 0, done.stderr
    assert f"{path} " in done.stdout
    return path


def offline(cache: Path, client: DockerClient) -> dict[str, str]:
    return NOWHERE | {"LAUNCHER_CACHE": str(cache), "DOCKER_HOST": engine_host(client)}


def test_the_same_image_is_built_where_nothing_can_be_fetched(
    engine: DockerClient, elsewhere: DockerClient, small: Small, packed: Path, tmp_path: Path
) -> None:
    here = engine.api.inspect_image(small.id)
    environment = offline(tmp_path / "cache", elsewhere) | small.env
    done = launcher("image", "build", "24.10", *small.instead, **environment)
    refused(done, 122 if "no index" in done.stderr else 125)  # neither package nor base is there

    taken = launcher("fetch", "--from", str(packed), **environment)
    assert taken.returncode == 0, taken.stderr
    assert taken.stdout.startswith("24.10: ")
    built = launcher("image", "build", "24.10", *small.instead, **environment)
    assert built.returncode == 0, built.stderr
    assert " built" in built.stdout

    there = elsewhere.api.inspect_image("megatron:24.10")
    for part in ("Config", "RootFS", "Architecture", "Os"):
        assert there[part] == here[part]
    if there["Created"] == here["Created"]:  # Docker 20.10 writes the time of the build there
        assert there["Id"] == here["Id"]


def test_a_row_from_git_is_carried_with_its_source(
    engine: DockerClient, site: Settings, tmp_path: Path
) -> None:
    at = os.environ.get("MEGATRON_CHECKOUT")
    if not at:
        pytest.skip("MEGATRON_CHECKOUT names no Megatron-LM repository to take a release from")
    mirror = tmp_path / "mirror/NVIDIA"
    mirror.mkdir(parents=True)
    (mirror / "Megatron-LM.git").symlink_to(Path(at).resolve())
    path = tmp_path / "git"
    row = ["fetch", "24.10", "--no-images"]
    file = tmp_path / "settings.yaml"
    file.write_text(f"git_mirror: file://{mirror.parent}\n")
    environment = {"LAUNCHER_CACHE": str(tmp_path / "first"), "LAUNCHER_SETTINGS": str(file)}
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
