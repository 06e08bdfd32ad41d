"""Megatron's models beside transformers' inside the image, which has all but transformers."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from docker.types import Mount

from launcher.base.settings import ROOT
from tests.e2e.command import launched, launcher, pytest_in, refused
from tests.tools.weights.models import made

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

FETCH = "--quiet --python-version 3.11 --only-binary :all: --constraint requirements-dev.txt"
"""For the Python of the cpu row, whichever runs the tests; the versions are the locked ones."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_weights_pass_their_tests_in_the_image(
    engine: DockerClient, cpu_images: CpuImages, tmp_path: Path, chosen: str
) -> None:
    target = ["--target", str(tmp_path), "transformers", "safetensors"]
    fetch = [sys.executable, "-m", "uv", "pip", "install", *FETCH.split(), *target]
    subprocess.run(fetch, cwd=ROOT, check=True)
    code, printed = pytest_in(
        engine,
        cpu_images.build(),
        "tests/tools/weights",
        chosen=chosen,
        workers=1,  # who imports torch, Megatron and transformers once
        environment={
            "PYTHONPATH": "/opt/megatron/lib:/opt/packages/lib:/transformers:/testing",
            "HF_HUB_OFFLINE": "1",
        },
        mounts=[Mount("/transformers", str(tmp_path), type="bind", read_only=True)],
    )
    assert code == 0, printed[-6000:]
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed[-2000:]
    assert int(passed[1]) >= (4 if chosen == "long" else 9)
    assert "skipped" not in printed.splitlines()[-1]


def test_a_checkpoint_says_something_in_the_image(image: str, tmp_path: Path) -> None:
    theirs = made(tmp_path / "theirs", "qwen2")
    launched("checkpoint", "import", str(theirs), "--to", str(tmp_path / "ours"))
    ids = (*"--ids --tokens 4 --tag".split(), image)
    said = launched("generate", str(tmp_path / "ours"), "5 6 7", *ids)
    assert len([int(word) for word in said.stdout.split()]) == 4, said.stdout
    wrong = launcher("generate", str(tmp_path / "ours"), "100", "--ids", "--tag", image)
    refused(wrong, 125, "tokens below 100")
