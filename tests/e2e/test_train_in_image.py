"""The tests of launcher.train that need torch and Megatron, inside images of two releases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.settings import ROOT

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine


@pytest.mark.timeout(900)
@pytest.mark.parametrize("megatron", ["0.10.0", "0.16.1"])
def test_launcher_train_passes_its_tests_in_the_image(
    engine: DockerClient, cpu_images: CpuImages, megatron: str
) -> None:
    """pytest comes from this environment, behind the image's own packages."""
    from docker.types import Mount

    container = engine.containers.create(
        cpu_images.build(megatron),
        ["python3", "-m", "pytest", "tests/train", "-m", "megatron", "-p", "no:cacheprovider"],
        init=True,
        network_mode="none",
        working_dir="/repo",
        environment={
            "PYTHONPATH": "/opt/megatron/lib:/opt/packages/lib:/testing",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "SMALL_DISK": "/small",
        },
        mounts=[Mount("/small", None, type="tmpfs", tmpfs_size=1 << 20)],
        volumes={
            str(ROOT): {"bind": "/repo", "mode": "ro"},
            str(Path(pytest.__file__).parents[1]): {"bind": "/testing", "mode": "ro"},
        },
    )
    try:
        container.start()
        code = container.wait()["StatusCode"]
        printed = container.logs().decode()
    finally:
        container.remove(force=True)
    assert code == 0, printed[-6000:]
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed[-2000:]
    assert int(passed[1]) >= 10
    assert "skipped" not in printed.splitlines()[-1]
