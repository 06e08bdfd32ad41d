"""A plan as a compose project, whose services are its nodes: pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from launcher.base import yamlfile
from launcher.base.errors import UsageError
from launcher.base.names import LABEL
from launcher.runs.backends import shown
from launcher.runs.backends.docker.docker_request import NO_NEW_PRIVILEGES, container_name
from launcher.runs.backends.group import node_name
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.secrets import is_secret

NETWORK = "nodes"
NO_NETWORK = "none"
"""What a run file says for a container that reaches nobody; of several nodes, nobody else."""

TENSORBOARD, TENSORBOARD_PORT = "tensorboard", 6006
TENSORBOARD_PORTS = f"{TENSORBOARD_PORT}-{TENSORBOARD_PORT + 9}"
"""Of this machine, the first that is free: several runs may be looked at."""

PORT = "PET_MASTER_PORT"
READY = {"interval": "5s", "timeout": "10s", "start_period": "600s", "retries": 3}
"""A program has ten minutes to open its port; a check that fails before counts for nothing."""


@dataclass(frozen=True)
class ComposeRequest:
    """A project: its name, its compose file, and the secret variables that the file names."""

    name: str
    file: dict[str, Any]
    secrets: dict[str, str]

    @property
    def text(self) -> str:
        """The file as YAML."""
        told = yaml.dump(self.file, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=88)
        return str(told)


class _Dumper(yamlfile.PortableDumper):
    """Writes lists of words as lines of words."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def a_list(self, items: list[Any]) -> yaml.Node:
        words = all(isinstance(item, str) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=words)


_Dumper.add_representer(list, _Dumper.a_list)


def request(plan: Plan) -> ComposeRequest:
    """The project of `plan`. Raises UsageError for what compose can't do."""
    if plan.tie:
        raise UsageError(
            "--tie needs the container's standard input, which compose doesn't hand on",
            "Leave --tie out, or take --backend docker.",
        )
    if plan.nodes > 1 and plan.network not in (None, NO_NETWORK):
        raise UsageError(
            f"resources.network: {plan.network}, and nodes on one machine have a network of "
            "their own",
            "Leave resources.network out, or set it to none: that network reaches nothing else.",
        )
    nodes = [*of_nodes(plan)]
    services = {node_name(rank): _service(node, rank) for rank, node in enumerate(nodes)}
    if board := _tensorboard(plan):
        services[TENSORBOARD] = board
    file: dict[str, Any] = {"name": project_name(plan), "services": services}
    if plan.nodes > 1:
        own = {"driver": "bridge"} | ({"internal": True} if plan.network == NO_NETWORK else {})
        file["networks"] = {NETWORK: own}
    return ComposeRequest(project_name(plan), file, shown.secrets(plan))


def project_name(plan: Plan) -> str:
    """The container's name as compose takes it: lower case, no dots."""
    return re.sub(r"[^a-z0-9_-]", "-", container_name(plan).lower())


def of_nodes(plan: Plan) -> Iterator[Plan]:
    """The plan of each node: the first one's, with another rank and other GPUs."""
    if plan.nodes == 1:
        yield plan
        return
    for rank in range(plan.nodes):
        env = dict(plan.env) | {"PET_NODE_RANK": str(rank)}
        labels = dict(plan.labels) | {f"{LABEL}node": str(rank)}
        yield replace(
            plan,
            env=tuple(sorted(env.items())),
            labels=tuple(sorted(labels.items())),
            gpus=plan.gpus.of_node(rank),
        )


def _service(plan: Plan, rank: int) -> dict[str, Any]:
    """One node."""
    name = container_name(plan)
    service: dict[str, Any] = {
        "image": plan.image,
        "pull_policy": "never",
        "container_name": name if plan.nodes == 1 else f"{name}-{node_name(rank)}",
        "command": _command(plan),
        "environment": {k: None if is_secret(k, value) else value for k, value in plan.env},
        "init": plan.init,
        "ipc": plan.ipc,
        "ulimits": dict(plan.ulimits),
        "stop_grace_period": f"{plan.stop_grace}s",
        "shm_size": plan.shm_size,
        "mem_limit": plan.memory,
        "user": plan.user,
        "group_add": [str(group) for group in plan.groups],
        "security_opt": [NO_NEW_PRIVILEGES] if plan.no_new_privileges else [],
        "cap_add": [*plan.cap_add],
        "devices": [one if ":" in one else f"{one}:{one}" for one in plan.devices],
        "working_dir": plan.workdir,
        "volumes": [_mount(mount) for mount in plan.mounts],
        "labels": dict(plan.labels),
    }
    if plan.gpus.count:
        service["deploy"] = {"resources": {"reservations": {"devices": [_devices(plan)]}}}
    service |= _networking(plan, rank)
    return dict(_escaped(shown.filled(service)))


def _networking(plan: Plan, rank: int) -> dict[str, Any]:
    """One node has what the engine gives; several start in order, in a network of their own."""
    if plan.nodes == 1:
        return {"network_mode": plan.network or "bridge"}
    if rank == 0:
        return {"networks": [NETWORK], "healthcheck": {"test": _listens(plan), **READY}}
    return {"networks": [NETWORK], "depends_on": {node_name(0): {"condition": "service_healthy"}}}


def _listens(plan: Plan) -> list[str]:
    """A command that succeeds once the port of the first node is open; it connects to nothing.

    In the kernel's tables (Documentation/networking/proc_net_tcp.rst) a port is in hexadecimal,
    and a socket that listens is in state 0A.
    """
    port = int(dict(plan.env)[PORT] or 0)
    line = rf": [0-9A-F]+:{port:04X} [0-9A-F]+:0000 0A "
    return ["CMD", "grep", "-qsE", line, "/proc/net/tcp", "/proc/net/tcp6"]


def _command(plan: Plan) -> list[str]:
    """The command, in which a secret stands as the variable that has it."""
    found = shown.secret_words(plan.argv)
    return [
        _PlainText(f"{shown.literal(found[at][0])}${{SECRET_{at}?export it first}}")
        if at in found
        else word
        for at, word in enumerate(plan.argv)
    ]


class _PlainText(str):
    """Text that compose is to fill in."""


def _escaped(value: Any) -> Any:
    """`value` with every $ doubled, which compose reads as one and fills nothing in."""
    if isinstance(value, _PlainText):
        return str(value)
    if isinstance(value, str):
        return shown.literal(value)
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    return [_escaped(item) for item in value] if isinstance(value, list) else value


def _mount(mount: Mount) -> dict[str, Any]:
    described: dict[str, Any] = {
        "type": "bind",
        "source": mount.source,
        "target": mount.target,
        "bind": {"create_host_path": False},
    }
    return described | ({"read_only": True} if mount.read_only else {})


def _devices(plan: Plan) -> dict[str, Any]:
    """The GPUs asked for: those named, or a number of any."""
    asked: dict[str, Any] = {"driver": "nvidia"}
    if plan.gpus.devices:
        asked["device_ids"] = list(plan.gpus.devices)
    else:
        asked["count"] = "all" if plan.gpus.everything else plan.gpus.count
    return asked | {"capabilities": ["gpu"]}


def _tensorboard(plan: Plan) -> dict[str, Any] | None:
    """A service that shows what the run writes for TensorBoard, on this machine alone."""
    folder = next((mount for mount in plan.mounts if mount.target == "/tensorboard"), None)
    if folder is None:
        return None
    options = ["--logdir", folder.target, "--host", "0.0.0.0"]  # noqa: S104 - in the container
    port = {"host_ip": "127.0.0.1", "published": TENSORBOARD_PORTS, "target": TENSORBOARD_PORT}
    service: dict[str, Any] = {
        "image": plan.image,
        "pull_policy": "never",
        "command": ["python3", "-m", "tensorboard.main", *options],
        "init": True,
        "user": plan.user,
        "group_add": [str(group) for group in plan.groups],
        "security_opt": [NO_NEW_PRIVILEGES],
        "volumes": [_mount(replace(folder, read_only=True))],
        "ports": [port],
    }
    return dict(_escaped(shown.filled(service)))


UP = ("up", "--detach")


def show(plan: Plan) -> str:
    """`docker compose` with its file on standard input, after the `mkdir` that it needs."""
    wanted = request(plan)
    secrets = shown.wanted(wanted.secrets)
    argv = ["docker", "compose", "--project-name", wanted.name, "--file", "-", *UP]
    up = shown.lines([argv]).rstrip("\n")
    return f"{shown.folders(plan)}{secrets}{up} <<'EOF'\n{wanted.text}EOF\n"
