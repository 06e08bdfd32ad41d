"""Saving and loading an image beside `docker save | zstd -T0` and its inverse."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.measure import Figure, timed
from launcher.base.errors import EngineError
from launcher.base.screen import Progress
from launcher.base.settings import Settings
from launcher.images.builder.image import BuildRequest, Builds
from launcher.images.engine.connect import cli_environment, docker_cli, engine_host
from launcher.images.engine.private import private

if TYPE_CHECKING:
    from docker import DockerClient

NAME = "launchpad-bench"
ROUNDS = 3


def figures(client: DockerClient, site: Settings, base: str, builder: str) -> list[Figure]:
    """The cpu image out of this engine, and into another that has nothing; best of three each."""
    docker = docker_cli(client)
    if docker is None or shutil.which("zstd") is None:
        raise EngineError("the comparison needs the programs docker and zstd", "Install them.")
    builds = Builds(client, site, Progress(), NAME)
    image = builds.build(BuildRequest("cpu", base=base, builder=builder)).names[-1]
    launcher = [sys.executable, "-m", "launcher", "image"]
    here = cli_environment(client)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir=site.cache) as scratch:
        packed = Path(scratch, "image.tar.zst")
        for number in range(ROUNDS):
            folder = Path(scratch, str(number))
            peer = f"{docker} save {image} | zstd -q -T0 -f -o {packed}"
            _add(times, "save peer", timed(["sh", "-c", peer], here))
            _add(times, "save", timed([*launcher, "save", image, "-o", str(folder)], here))
        with private.private_engine(Path(scratch, "engine")) as other:
            there = cli_environment(other) | {"DOCKER_HOST": engine_host(other)}
            load = [*launcher, "load", "--all-tags", str(folder)]
            peer = f"zstd -q -dc {packed} | {docker} load"
            for _ in range(ROUNDS):
                for name, command in (("load peer", ["sh", "-c", peer]), ("load", load)):
                    _add(times, name, timed(command, there))
                    other.images.remove(image, force=True)
    best = {name: min(seconds) for name, seconds in times.items()}
    return [
        Figure(
            "image save, of docker save | zstd -T0", best["save"] / best["save peer"], 1.25, "x"
        ),
        Figure("image load, of zstd -d | docker load", best["load"] / best["load peer"], 1.25, "x"),
    ]


def _add(times: dict[str, list[float]], name: str, seconds: float) -> None:
    times.setdefault(name, []).append(seconds)
