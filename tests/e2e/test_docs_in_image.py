"""The transcripts of docs/, repeated inside the CPU image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.command import pytest_in

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages


@pytest.mark.long
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_transcripts_of_the_pages_are_what_a_user_sees_in_the_image(
    engine: DockerClient, cpu_images: CpuImages
) -> None:
    """This environment has no torch, so nothing would hold them to the code."""
    code, printed = pytest_in(
        engine, cpu_images.build(), "tests/test_docs.py", chosen="long", workers=1
    )
    if "No module named 'pydantic_core" in printed:
        pytest.skip("this environment's Python isn't the image's")
    assert code == 0, printed[-6000:]
    assert "skipped" not in printed.splitlines()[-1]
