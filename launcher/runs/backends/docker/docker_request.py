"""A plan as one container of a Docker-compatible engine: what the engine is asked, and shown."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from launcher.runs.backends import shown
from launcher.runs.payload import TARGET
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.secrets import is_secret

LOCAL = "http+docker://localhost"
"""How docker's SDK addresses a socket of this machine; over ssh it has another host there."""

NO_NEW_PRIVILEGES = "no-new-privileges"
"""Of a process in the container, and of all that it starts: by no setuid program either."""

EVERY_GPU = "nvidia.com/gpu=all"
UNITS = {"b": 0, "k": 1, "m": 2, "g": 3}


@dataclass(frozen=True)
class ContainerRequest:
    """A container to create: its name, and the body that the engine's API takes."""

    name: str
    body: dict[str, Any]


def request(plan: Plan) -> ContainerRequest:
    """The container of `plan`."""
    body: dict[str, Any] = {
        "Image": plan.image,
        "Cmd": list(plan.argv),
        "Env": [name if value is None else f"{name}={value}" for name, value in plan.env],
        "Labels": dict(plan.labels),
        "AttachStdin": plan.tie,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": plan.tie,
        "StdinOnce": plan.tie,
        "StopTimeout": plan.stop_grace,
        "HostConfig": _host_config(plan),
    }
    if plan.user:
        body["User"] = plan.user
    if plan.workdir:
        body["WorkingDir"] = plan.workdir
    return ContainerRequest(container_name(plan), body)


def container_name(plan: Plan) -> str:
    """The run's name in the engine's lists."""
    return f"{plan.name}-{plan.run}"


def _host_config(plan: Plan) -> dict[str, Any]:
    config: dict[str, Any] = {
        "Init": plan.init,
        "IpcMode": plan.ipc,
        "Mounts": [_mount(mount) for mount in plan.mounts],
        "Ulimits": [{"Name": name, "Soft": n, "Hard": n} for name, n in plan.ulimits],
    }
    if plan.no_new_privileges:
        config["SecurityOpt"] = [NO_NEW_PRIVILEGES]
    if plan.cap_add:
        config["CapAdd"] = list(plan.cap_add)
    if plan.devices:
        config["Devices"] = [_device(one) for one in plan.devices]
    if plan.groups:
        config["GroupAdd"] = [str(group) for group in plan.groups]
    if plan.network:
        config["NetworkMode"] = plan.network
    if plan.shm_size:
        config["ShmSize"] = bytes_of_size(plan.shm_size)
    if plan.memory:
        config["Memory"] = bytes_of_size(plan.memory)
    if plan.gpus.count:
        config["DeviceRequests"] = [_devices(plan)]
    return config


def _mount(mount: Mount) -> dict[str, Any]:
    described: dict[str, Any] = {"Type": "bind", "Source": mount.source, "Target": mount.target}
    return described | ({"ReadOnly": True} if mount.read_only else {})


def _device(text: str) -> dict[str, str]:
    """A device, or a folder of them, as the API has `--device`."""
    here, there, access = [*text.split(":"), "", ""][:3]
    described = {"PathOnHost": here, "PathInContainer": there or here}
    return described | {"CgroupPermissions": access or "rwm"}


def _devices(plan: Plan) -> dict[str, Any]:
    """The GPUs asked for: those named, or a number of any, -1 for all."""
    request: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    if plan.gpus.devices:
        return request | {"Count": 0, "DeviceIDs": list(plan.gpus.devices)}
    return request | {"Count": -1 if plan.gpus.everything else plan.gpus.count, "DeviceIDs": None}


def bytes_of_size(size: str) -> int:
    """The bytes of '512m'."""
    number, unit = (size[:-1], size[-1].lower()) if size[-1].isalpha() else (size, "b")
    return int(number) << 10 * UNITS[unit]


def command(plan: Plan) -> list[str]:
    """The `docker run` that creates the same container; secrets come from the environment.

    It is removed in the end, as the launcher does it, so that the line can be used again.
    """
    argv = ["docker", "run", "--rm", "--name", container_name(plan), "--init"]
    argv += ["--interactive"] if plan.tie else []
    if plan.gpus.count:
        argv += ["--gpus", _csv(str(plan.gpus)) if plan.gpus.devices else str(plan.gpus)]
    argv += ["--ipc", plan.ipc]
    for flag, value in (
        ("--shm-size", plan.shm_size),
        ("--memory", plan.memory),
        ("--network", plan.network),
        ("--user", plan.user),
        ("--workdir", plan.workdir),
    ):
        argv += [flag, value] if value else []
    argv += ["--security-opt", NO_NEW_PRIVILEGES] if plan.no_new_privileges else []
    for capability in plan.cap_add:
        argv += ["--cap-add", capability]
    for device in plan.devices:
        argv += ["--device", device]
    for group in plan.groups:
        argv += ["--group-add", str(group)]
    for name, limit in plan.ulimits:
        argv += ["--ulimit", f"{name}={limit}"]
    argv += ["--stop-timeout", str(plan.stop_grace)]
    for name, value in plan.env:
        by_name = value is None or is_secret(name, value)
        argv += ["--env", name if by_name else f"{name}={value}"]
    for mount in plan.mounts:
        argv += ["--mount", mount_option(mount)]
    for name, value in plan.labels:
        argv += ["--label", f"{name}={value}"]
    return [*argv, "--", plan.image, *shown.by_name(plan.argv)]


def mount_option(mount: Mount) -> str:
    """A mount as --mount has it."""
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    return _csv(*fields, *(["readonly"] if mount.read_only else []))


def _csv(*fields: str) -> str:
    """The fields as one line of CSV, which is how docker reads --mount and --gpus."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def shell_command(plan: Plan, *, terminal: bool) -> list[str]:
    """The `docker run` that opens a shell as the plan's user, with its files and GPUs."""
    argv = command(replace(plan, argv=(), tie=True))
    attached = ["--tty"] if terminal else []
    return [*argv[:2], *attached, *argv[2:], *(plan.argv or ("bash",))]


def show(plan: Plan, *, shares_files: bool = True) -> str:
    """`docker run`, after the `mkdir` that it needs; both work when pasted.

    An engine that doesn't share this machine's files gets a copy of the payload before the start.
    """
    commands, sent = [command(plan)], plan.payload_mount
    if sent and not shares_files:
        _, _, _, *rest = command(plan.without_payload())
        name = container_name(plan)
        copy = ["docker", "cp", sent.source.removesuffix("/launcher"), f"{name}:{TARGET}"]
        start = ["docker", "start", "--attach", *(["--interactive"] if plan.tie else []), name]
        commands = [["docker", "create", "--rm", *rest], copy, start]
    return shown.folders(plan) + shown.wanted(shown.secrets(plan)) + shown.lines(commands)


def is_rootless(info: Mapping[str, Any]) -> bool:
    """Whether the engine with this information about itself runs without root."""
    told = any("name=rootless" in option for option in info.get("SecurityOptions") or [])
    return told or bool(info.get("Rootless"))  # which is how Podman says it
