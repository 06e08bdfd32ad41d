"""Reads Kubernetes manifests and compose files: each container as the `docker run` of a script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from launcher.base.errors import UsageError

KINDS = ("PyTorchJob", "TrainJob", "JobSet", "Job", "Pod")
SUFFIXES = (".yaml", ".yml", ".json")
OF_SERVICES = {"shm_size": "--shm-size", "ipc": "--ipc", "network_mode": "--network"}
"""Keys of compose, and docker's options for them."""


@dataclass(frozen=True)
class ManifestScript:
    """A script that starts what a manifest starts, its nodes, and what the cluster sets."""

    text: str
    nodes: int
    variables: dict[str, str] = field(default_factory=dict)


def as_script(text: str, name: str) -> ManifestScript:
    """The script of a manifest. Raises UsageError for what is none, or starts no container."""
    try:
        documents = [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{name}: no YAML: {str(error).splitlines()[0]}") from None
    found = list[tuple[int, str]]()
    for document in documents:
        try:
            found += _of_document(document)
        except (AttributeError, TypeError, KeyError, ValueError):
            kind = str(document.get("kind") or "compose file")[:40]
            raise UsageError(f"{name}: a {kind} that isn't written as its documents ask") from None
    if not found:
        what = ", ".join(str(one.get("kind", "no kind"))[:40] for one in documents) or "nothing"
        takes = f"It takes a shell script, {', '.join(KINDS)} and compose files."
        raise UsageError(f"{name}: no container that starts something: {what}", takes)
    rows = text.splitlines()
    line = next((n for n, row in enumerate(rows) if re.match(r"\s*(- )?(command|args):", row)), 0)
    nodes = max(count for count, _ in found)
    script = "\n" * line + " ; ".join(command for _, command in found) + "\n"
    variables = dict.fromkeys(("WORLD_SIZE", "PET_NNODES"), str(nodes))
    variables |= {"RANK": "0", "MASTER_ADDR": "first-node", "MASTER_PORT": "29500"}
    return ManifestScript(script, nodes, variables)


def _of_document(document: dict[str, Any]) -> Iterator[tuple[int, str]]:
    """The nodes and the docker line of each container of a document."""
    kind, spec = document.get("kind"), document.get("spec") or {}
    if kind is None and isinstance(document.get("services"), dict):
        for service in document["services"].values():
            yield 1, _service(service)
    elif kind == "PyTorchJob":
        replicas = [*spec["pytorchReplicaSpecs"].values()]
        nodes = sum(int(one.get("replicas", 1)) for one in replicas)
        for one in replicas[:1]:
            yield from _of_pod(one["template"]["spec"], nodes)
    elif kind == "TrainJob":
        trainer = {**spec["trainer"], "resources": spec["trainer"].get("resourcesPerNode")}
        yield from _of_pod({"containers": [trainer]}, int(trainer.get("numNodes", 1)))
    elif kind == "JobSet":
        for one in spec["replicatedJobs"]:
            job = one["template"]["spec"]
            nodes = int(one.get("replicas", 1)) * int(job.get("parallelism", 1))
            yield from _of_pod(job["template"]["spec"], nodes)
    elif kind == "Job":
        yield from _of_pod(spec["template"]["spec"], int(spec.get("parallelism", 1)))
    elif kind == "Pod":
        yield from _of_pod(spec, 1)


def _of_pod(pod: dict[str, Any], nodes: int) -> Iterator[tuple[int, str]]:
    volumes = (one for one in pod.get("volumes") or () if "hostPath" in one)
    paths = {one["name"]: one["hostPath"]["path"] for one in volumes}
    for one in pod["containers"]:
        resources = one.get("resources") or {}
        asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
        gpus = [count for key, count in asked.items() if key.endswith(("/gpu", "/gpus"))]
        env = [
            f"{pair['name']}={pair['value']}" for pair in one.get("env") or () if "value" in pair
        ]
        mounts = (mount for mount in one.get("volumeMounts") or () if mount["name"] in paths)
        mounted = [f"{paths[mount['name']]}:{mount['mountPath']}" for mount in mounts]
        options = {"--gpus": gpus[:1], "-e": env, "-v": mounted}
        yield nodes, _docker(one, options, [*(one.get("command") or ()), *(one.get("args") or ())])


def _service(service: dict[str, Any]) -> str:
    """The docker line of a service of compose."""
    reserved = (service.get("deploy") or {}).get("resources", {}).get("reservations", {})
    env = service.get("environment") or {}
    mounts = [
        mount if isinstance(mount, str) else f"{mount['source']}:{mount['target']}"
        for mount in service.get("volumes") or ()
        if isinstance(mount, str) or mount.get("type") == "bind"
    ]
    options = {
        "--gpus": [device.get("count", "all") for device in reserved.get("devices") or ()],
        "-e": env if isinstance(env, list) else [f"{key}={value}" for key, value in env.items()],
        "-v": mounts,
        **{option: [service[key]] for key, option in OF_SERVICES.items() if key in service},
    }
    command = [
        word
        for line in (service.get("entrypoint"), service.get("command"))
        for word in (line if isinstance(line, list) else shlex.split(str(line or "")))
    ]
    return _docker(service, options, command)


def _docker(container: dict[str, Any], options: dict[str, list[Any]], command: list[Any]) -> str:
    """The line that starts a container with docker, quoted for bash."""
    words = [
        "docker",
        "run",
        *(w for name, values in options.items() for v in values for w in (name, v)),
    ]
    return shlex.join(map(str, [*words, container.get("image") or "no-image-named", *command]))
