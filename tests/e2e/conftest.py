"""Engines, images and folders that these tests share; and what builds leave, bounded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from docker import DockerClient

from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine.acquire import BaseNames
from launcher.images.engine.connect import engine_host
from launcher.images.engine.private import packages, private
from tests.conftest import NAMES, CpuImages, tidy
from tests.e2e.command import matrix_folder
from tests.e2e.registry import Registry, serving
from tests.e2e.site import Site, make_site


@pytest.fixture(scope="session")
def image(cpu_images: CpuImages) -> str:
    """The cpu row with its default release."""
    return cpu_images.build()


@dataclass(frozen=True)
class Small:
    """An image without torch, of a row on the stand-in, and the site that it is made by."""

    name: str
    id: str
    site: Settings
    bases: BaseNames

    @property
    def instead(self) -> list[str]:
        """The options that name its base and its builder."""
        return ["--base", self.bases.base, "--builder", self.bases.builder]

    @property
    def env(self) -> dict[str, str]:
        return {"LAUNCHER_MATRIX": str(self.site.matrix)}


@pytest.fixture(scope="session")
def small(
    engine: DockerClient, site: Settings, bases: BaseNames, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Small]:
    """Row 24.10 with this base's Python, and the smallest release."""
    row = {"python": "3.11", "megatron": "0.10.0", "source": "sdist"}
    own = replace(site, matrix=matrix_folder(tmp_path_factory.mktemp("matrix"), {"24.10": row}))
    request = BuildRequest("24.10", base=bases.base, builder=bases.builder)
    made = Builds(engine, own, Progress(), f"{NAMES}-small").build(request)
    yield Small(made.names[0], made.id, own, bases)
    for name in made.names:
        engine.api.remove_image(name)


@pytest.fixture(scope="session")
def registry(
    engine: DockerClient, site: Settings, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Registry]:
    """A real registry, empty at first, that the engine and this process reach by one name."""
    with serving(site.cache, tmp_path_factory.mktemp("registry"), engine_host(engine)) as found:
        yield found


@pytest.fixture
def here(engine: DockerClient, tmp_path: Path) -> Iterator[Site]:
    """A folder to use the launcher in; afterwards nothing of it may be left."""
    site = make_site(tmp_path, engine)
    yield site
    assert site.end() == []


@pytest.fixture(scope="module", autouse=True)
def _tidied(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each module that uses the engine, so that the layer cache keeps to its bound.

    Modules that run again inside an image have no engine there.
    """
    used = [item for item in request.session.items if item.path == request.path]
    using = any("engine" in item.fixturenames for item in used if isinstance(item, pytest.Function))
    engine = request.getfixturevalue("engine") if using else None
    yield
    if engine is not None:
        tidy(engine)


@pytest.fixture(scope="session")
def second_engine(
    site: Settings, engine: DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DockerClient]:
    """A second engine, with no network outside."""
    if reason := private.unsupported():
        pytest.skip(f"a second engine: {reason}")
    folder = tmp_path_factory.mktemp("elsewhere")
    unpacked = site.cache / "engine/packages"
    if (unpacked / packages.COMPLETE).exists():
        (folder / "packages").symlink_to(unpacked)
    with private.private_engine(folder) as client:
        yield client
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def elsewhere(second_engine: DockerClient) -> Iterator[DockerClient]:
    """The second engine, with nothing in it: it is emptied again at the end."""
    yield second_engine
    for container in second_engine.containers.list(all=True):
        container.remove(force=True)
    for image in second_engine.images.list():
        second_engine.images.remove(image.id, force=True)
    second_engine.api.prune_builds(all=True)
