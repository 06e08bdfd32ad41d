"""A second engine, for what must not touch the first one's images or must not have them; and what
builds leave, bounded: a whole run of these tests makes tens of GB of layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker import DockerClient

from launcher.engine.private import packages, private
from launcher.settings import Settings
from tests.conftest import tidy


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


@pytest.fixture
def other_engine(site: Settings, tmp_path: Path) -> Iterator[DockerClient]:
    """An engine with no image in it, and no network outside."""
    if reason := private.unsupported():
        pytest.skip(f"a second engine: {reason}")
    folder = tmp_path / "engine"
    unpacked = site.cache / "engine/packages"
    if (unpacked / packages.COMPLETE).exists():
        folder.mkdir()
        (folder / "packages").symlink_to(unpacked)
    with private.private_engine(folder) as client:
        yield client
    shutil.rmtree(folder, ignore_errors=True)
