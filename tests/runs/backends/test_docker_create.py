"""What the engine makes of a request, and of the command that is shown for it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from launcher.base.errors import EngineError
from launcher.runs.backends.docker import docker_job, docker_request
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.values import parse_gpus

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine

KINDS = ["bare", "full", "all"]
"""Of plans: of_kind makes one of each; other ways to ask for GPUs are in test_docker."""

CLI_DEFAULTS = {"ConsoleSize", "MemorySwappiness", "RestartPolicy"}
"""What the docker command sends though nobody asked: it means the same as leaving it out."""

OF_THE_LINE = {"AutoRemove"}
"""What the line alone asks for: the launcher removes its container itself, once it has its log."""


@contextmanager
def created(client: DockerClient, plan: Plan) -> Iterator[dict[str, Any]]:
    """What inspect shows of the container that the backend asks for."""
    container = docker_job._create(client.api, plan)
    try:
        yield client.api.inspect_container(container)
    finally:
        client.api.remove_container(container, force=True)


@contextmanager
def pasted(client: DockerClient, plan: Plan) -> Iterator[dict[str, Any]]:
    """What inspect shows of the container of the shown line, created only."""
    from launcher.images.engine.connect import cli_environment, docker_cli

    line = docker_request.show(plan).splitlines()[-1].replace("docker run ", "$DOCKER create ", 1)
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
        kept = {
            key: told(item) for key, item in value.items() if key not in CLI_DEFAULTS | OF_THE_LINE
        }
        return {key: item for key, item in kept.items() if item}
    return [told(item) for item in value] if isinstance(value, list) else value


def comparable(shown: dict[str, Any]) -> dict[str, Any]:
    """What a container was asked to be; the engine keeps variables and mounts in any order."""
    parts = told({k: shown[k] for k in ("HostConfig", "Config", "Mounts", "Name", "Path", "Args")})
    parts["Config"].pop("Hostname")
    parts["Config"]["Env"] = sorted(parts["Config"]["Env"])
    parts["Mounts"] = sorted(parts.get("Mounts", []), key=lambda mount: mount["Destination"])
    return dict(parts)


def assert_same(client: DockerClient, plan: Plan) -> dict[str, Any]:
    """What inspect shows of the launcher's own container, which the shown line's is like."""
    with created(client, plan) as ours:
        pass
    with pasted(client, plan) as theirs:
        pass
    assert comparable(ours) == comparable(theirs)
    return ours


def of_kind(kind: str, bare: Plan, full: Plan) -> Plan:
    """The bare plan, or the full one with two GPUs, or all."""
    gpus = replace(parse_gpus("all" if kind == "all" else "device=0,1"), count=2)
    return bare if kind == "bare" else replace(full, gpus=gpus)


@pytest.mark.parametrize("kind", KINDS)
def test_the_shown_line_makes_the_same_container(
    engine: DockerClient,
    python_image: str,
    bare: Plan,
    full: Plan,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKEN", "passed on by its name")
    assert_same(engine, replace(of_kind(kind, bare, full), image=python_image))


def test_a_strangers_container_of_the_name_stays_and_is_told(
    engine: DockerClient, python_image: str, bare: Plan
) -> None:
    labels = (("megatron-launchpad.run", "6f7a8b9c"),)
    plan = replace(bare, image=python_image, run="6f7a8b9c", labels=labels)
    with created(engine, replace(plan, labels=())) as seen:
        with pytest.raises(EngineError, match="there is a container test-6f7a8b9c already"):
            docker_job.start(engine.api, plan, attach=False)
        assert engine.api.inspect_container("test-6f7a8b9c")["Id"] == seen["Id"]
