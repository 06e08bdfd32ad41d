"""What the engine makes of a request, and of the command that is shown for it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from launcher.backends import docker
from launcher.run.gpus import parse_gpus
from launcher.run.plan import Plan

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine

CLI_DEFAULTS = {"ConsoleSize", "MemorySwappiness", "RestartPolicy"}
"""What the docker command sends though nobody asked: it means the same as leaving it out."""


@contextmanager
def created(client: DockerClient, plan: Plan) -> Iterator[dict[str, Any]]:
    """What inspect shows of the container that the backend asks for."""
    wanted = docker.request(plan)
    container = client.api.create_container_from_config(wanted.body, wanted.name)["Id"]
    try:
        yield client.api.inspect_container(container)
    finally:
        client.api.remove_container(container, force=True)


@contextmanager
def pasted(client: DockerClient, plan: Plan) -> Iterator[dict[str, Any]]:
    """What inspect shows of the container of the shown line, created only."""
    from launcher.engine.connect import cli_environment, docker_cli

    line = docker.show(plan).splitlines()[-1].replace("docker run ", "$DOCKER create ", 1)
    env = cli_environment(client) | {"DOCKER": shlex.quote(docker_cli(client) or "docker")}
    made = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env)
    assert made.returncode == 0, made.stderr
    container = made.stdout.strip()
    try:
        yield client.api.inspect_container(container)
    finally:
        client.api.remove_container(container, force=True)


def told(value: Any) -> Any:
    """A value without what says nothing: None, False, 0 and what is empty."""
    if isinstance(value, dict):
        kept = {key: told(item) for key, item in value.items() if key not in CLI_DEFAULTS}
        return {key: item for key, item in kept.items() if item}
    return [told(item) for item in value] if isinstance(value, list) else value


def comparable(shown: dict[str, Any]) -> dict[str, Any]:
    """What a container was asked to be; the engine keeps variables and mounts in any order."""
    parts = told({k: shown[k] for k in ("HostConfig", "Config", "Mounts", "Name", "Path", "Args")})
    parts["Config"].pop("Hostname")
    parts["Config"]["Env"] = sorted(parts["Config"]["Env"])
    parts["Mounts"] = sorted(parts.get("Mounts", []), key=lambda mount: mount["Destination"])
    return dict(parts)


@pytest.mark.parametrize(
    ("gpus", "count", "ids"),
    [("2", 2, None), ("all", -1, None), ("device=0,1", 0, ["0", "1"]), ("device=3", 0, ["3"])],
)
def test_the_engine_is_asked_for_gpus(
    engine: DockerClient, python_image: str, bare: Plan, gpus: str, count: int, ids: list[str]
) -> None:
    asked = replace(parse_gpus(gpus), count=2)
    with created(engine, replace(bare, image=python_image, gpus=asked)) as shown:
        (devices,) = shown["HostConfig"]["DeviceRequests"]
    assert (devices["Count"], devices["DeviceIDs"]) == (count, ids)
    assert devices["Capabilities"] == [["gpu"]]


@pytest.mark.parametrize("kind", ["bare", "full", "all", "number", "one device"])
def test_the_shown_line_makes_the_same_container(
    engine: DockerClient, python_image: str, bare: Plan, full: Plan, kind: str
) -> None:
    # Only the command passes a variable's own value on; the backend does so as it launches.
    full = replace(full, env=tuple(pair for pair in full.env if pair[1] is not None))
    asked = {"all": "all", "number": "2", "one device": "device=3"}.get(kind, "device=0,1")
    gpus = replace(parse_gpus(asked), count=2)
    plan = bare if kind == "bare" else replace(full, gpus=gpus)
    plan = replace(plan, image=python_image)
    with created(engine, plan) as ours:
        pass
    with pasted(engine, plan) as theirs:
        pass
    assert comparable(ours) == comparable(theirs)
