"""What compose and the engine make of a file: the container that the docker backend makes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.images.engine.compose_plugin import compose as program
from launcher.images.engine.connect import cli_environment
from launcher.runs.backends.compose import compose_job, compose_request
from launcher.runs.plan.plan import Plan

from .test_docker import SECRET, with_secrets
from .test_docker_create import KINDS, comparable, created, of_kind

if TYPE_CHECKING:
    from docker import DockerClient

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[3]
COMPOSES_OWN = ("com.docker.compose.", "desktop.docker.io/")


def ask(client: DockerClient, plan: Plan, *words: str) -> str:
    """What compose prints when it is asked for something with the plan's file."""
    wanted = compose_request.request(plan)
    done = subprocess.run(
        [*program(client), "--project-name", wanted.name, "--file", "-", *words],
        input=wanted.text,
        env=cli_environment(client) | wanted.secrets,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def composed(client: DockerClient, plan: Plan) -> Iterator[list[dict[str, Any]]]:
    """What inspect shows of the containers that compose makes of a plan, created only."""
    name = compose_request.project_name(plan)
    try:
        ask(client, plan, "create")
        found = client.api.containers(all=True, filters={"label": f"{compose_job.PROJECT}={name}"})
        shown = [client.api.inspect_container(one["Id"]) for one in found]
        yield sorted(shown, key=lambda one: str(one["Name"]))
    finally:
        compose_job.remove(client.api, name)


def without_composes(shown: dict[str, Any]) -> dict[str, Any]:
    """A container without what compose adds to every one: labels, and the driver of GPUs.

    It has limits and mounts in no order of its own.
    """
    parts = comparable(shown)
    for field in ("Ulimits", "Mounts"):
        parts["HostConfig"][field] = sorted(parts["HostConfig"].get(field, []), key=str)
    labels = parts["Config"]["Labels"].items()
    kept = {name: value for name, value in labels if not name.startswith(COMPOSES_OWN)}
    parts["Config"]["Labels"] = kept
    for field in ("AttachStdin", "AttachStdout", "AttachStderr"):
        parts["Config"].pop(field, None)  # of the command that made it, not of the container
    for request in parts["HostConfig"].get("DeviceRequests", ()):
        request.pop("Driver", None)
    if parts["HostConfig"].get("NetworkMode") in ("default", "bridge"):
        parts["HostConfig"].pop("NetworkMode")
    return parts


@pytest.mark.parametrize("kind", KINDS)
def test_one_node_is_the_container_of_the_docker_backend(
    engine: DockerClient,
    python_image: str,
    bare: Plan,
    full: Plan,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TOKEN", "passed on by its name")
    plan = replace(of_kind(kind, bare, full), image=python_image, tie=False)
    with created(engine, plan) as ours:
        pass
    with composed(engine, plan) as (theirs,):
        pass
    assert without_composes(theirs) == without_composes(ours)


def test_a_variable_that_isnt_set_is_as_with_docker(
    engine: DockerClient, python_image: str, bare: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    plan = replace(bare, image=python_image, env=(("TOKEN", None),))
    with created(engine, plan) as ours:
        pass
    with composed(engine, plan) as (theirs,):
        pass
    assert theirs["Config"]["Env"] == ours["Config"]["Env"]


def test_secrets_reach_the_container(engine: DockerClient, python_image: str, bare: Plan) -> None:
    plan = with_secrets(replace(bare, image=python_image))
    with composed(engine, plan) as (shown,):
        pass
    assert f"API_KEY={SECRET}" in shown["Config"]["Env"]
    assert shown["Config"]["Cmd"] == [*plan.argv]


def test_several_nodes_keep_all_that_one_has(
    engine: DockerClient, python_image: str, full: Plan
) -> None:
    env = (("PET_MASTER_PORT", "29500"), ("PET_NODE_RANK", "0"))
    plan = replace(full, image=python_image, tie=False, nodes=2, env=env, network=None)
    plan = replace(plan, gpus=replace(plan.gpus, count=1))
    single = replace(plan, nodes=1)
    with created(engine, single) as ours:
        pass
    with composed(engine, plan) as nodes:
        networks = [one["HostConfig"]["NetworkMode"] for one in nodes]
    assert networks == [f"{compose_request.project_name(plan)}_{compose_request.NETWORK}"] * 2
    expected = without_composes(ours)
    for shown, node in zip(nodes, compose_request.of_nodes(plan), strict=True):
        found = without_composes(shown)
        found["Config"].pop("Healthcheck", None)
        found["HostConfig"].pop("NetworkMode")
        (request,) = found["HostConfig"].pop("DeviceRequests")
        assert request["DeviceIDs"] == [*node.gpus.devices]
        assert f"PET_NODE_RANK={node.labels[0][1]}" in found["Config"].pop("Env")
        assert found.pop("Name") != expected["Name"]
        found["Config"]["Labels"].pop("megatron-launchpad.node")
        left = without_composes(ours)
        left["HostConfig"].pop("DeviceRequests")
        left["Config"].pop("Env")
        left.pop("Name")
        left["HostConfig"].pop("NetworkMode", None)
        assert found == left


@pytest.mark.parametrize("path", sorted((ROOT / "compose").glob("*.yaml")), ids=lambda p: p.stem)
def test_examples_are_valid(engine: DockerClient, path: Path) -> None:
    argv = [*program(engine), "--file", str(path), "config"]
    done = subprocess.run(argv, env=cli_environment(engine), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    told = yaml.safe_load(done.stdout)["services"]
    assert told.keys() == yaml.safe_load(path.read_text())["services"].keys()
    mounted = [one["source"] for service in told.values() for one in service["volumes"]]
    own = {str(ROOT / "launcher")}  # the payload, of the checkout
    assert own < {*mounted}
    assert all(Path(source).is_relative_to(path.parent) for source in {*mounted} - own)
