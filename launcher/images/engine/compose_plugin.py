"""Finds docker compose; for an engine of our own it is downloaded."""

from __future__ import annotations

import platform
import re
import shutil
from typing import TYPE_CHECKING

from launcher.base.errors import EngineError
from launcher.images.engine.connect import ask, private_file
from launcher.images.engine.private import packages

if TYPE_CHECKING:
    from docker import DockerClient

PLUGIN = "usr/libexec/docker/cli-plugins/docker-compose"
PACKAGE, SUITE = "docker-compose", "trixie"
"""The first Debian whose package is the plugin; before it is the Python program of that name."""


def compose(client: DockerClient) -> list[str]:
    """The beginning of a compose command, for `cli_environment`. EngineError: there is none."""
    own, plugin = private_file(client, "usr"), private_file(client, PLUGIN)
    candidates = [[str(plugin)]] if plugin else []
    candidates += [[docker, "compose"]] if (docker := shutil.which("docker")) else []
    candidates += [[alone]] if (alone := shutil.which("docker-compose")) else []
    for argv in candidates:
        if _is_plugin(argv, client):
            return argv
    if own and platform.freedesktop_os_release()["ID"] == "debian":  # so are its mirror's suites
        folder = own.resolve().parents[1] / "compose"
        argv = [str(packages.unpack_newer(folder, PACKAGE, SUITE) / PLUGIN)]
        if _is_plugin(argv, client):
            return argv
    raise EngineError(
        "there is no docker compose here, version 2 or later",
        "Install it: docker-compose-plugin (of docker.com), docker-compose-v2 (Ubuntu), "
        "docker-compose (Debian 13 on).",
    )


def _is_plugin(argv: list[str], client: DockerClient) -> bool:
    """Whether it runs, and isn't version 1, which knows neither GPUs nor ordered starts."""
    done = ask([*argv, "version", "--short"], client)
    version = re.match(r"v?(\d+)\.", done.stdout) if done and done.returncode == 0 else None
    return version is not None and int(version[1]) >= 2
