"""Builds that are killed at any moment: the next one succeeds, and nothing damaged is ever used."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.settings import ROOT
from launcher.images.sources import fetch
from tests.conftest import NAMES
from tests.e2e.command import BUILD, killed

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.base.settings import Settings
    from launcher.images.engine.acquire import BaseNames
    from tests.conftest import CpuImages

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(1800)]

TIMES = 10
LATEST = 12.0  # seconds: it is compiling by then


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
