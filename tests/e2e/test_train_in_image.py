"""The tests of launcher.train that need torch and Megatron, inside images of two releases."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.e2e.command import pytest_in

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("megatron", "chosen"),
    [
        ("0.16.1", "not long"),
        pytest.param("0.16.1", "long", marks=pytest.mark.long),
        pytest.param("0.10.0", "not long", marks=pytest.mark.long),
    ],
)
def test_launcher_train_passes_its_tests_in_the_image(
    engine: DockerClient, cpu_images: CpuImages, megatron: str, chosen: str
) -> None:
    from docker.types import Mount

    code, printed = pytest_in(
        engine,
        cpu_images.build(megatron),
        "tests/train",
        chosen=chosen,
        environment={"SMALL_DISK": "/small"},
        mounts=[Mount("/small", None, type="tmpfs", tmpfs_size=1 << 20)],
    )
    assert code == 0, printed[-6000:]
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed[-2000:]
    assert int(passed[1]) >= 10
    assert "skipped" not in printed.splitlines()[-1]
