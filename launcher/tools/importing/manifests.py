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
    found = list[tuple[int, list[str]]]()
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
    script = "\n" * line + " ; ".join(" ".join(words) for _, words in found) + "\n"
    variables = {"WORLD_SIZE": str(nodes), "PET_NNODES": str(nodes), "RANK": "0"}
    variables |= {"MASTER_ADDR": "first-node", "MASTER_PORT": "29500"}
    return ManifestScript(script, nodes, variables)


def _of_document(document: dict[str, Any]) -> Iterator[tuple[int, list[str]]]:
    """The nodes and the docker line of each container of a document."""
    kind, spec = document.get("kind"), document.get("spec") or {}
    if kind is None and isinstance(document.get("services"), dict):
        for service in document["services"].values():
            yield 1, _service(service)
    elif kind == "PyTorchJob":
        replicas = spec["pytorchReplicaSpecs"]
        nodes = sum(int(one.get("replicas", 1)) for one in replicas.values())
        for one in list(replicas.values())[:1]:
            yield from _of_pod(one["template"]["spec"], nodes)
    elif kind == "TrainJob":
        trainer = spec["trainer"]
        trainer = {**trainer, "resources": trainer.get("resourcesPerNode") or {}}
        yield int(trainer.get("numNodes", 1)), _container(trainer, {})
    elif kind == "JobSet":
        for one in spec["replicatedJobs"]:
            job = one["template"]["spec"]
            nodes = int(one.get("replicas", 1)) * int(job.get("parallelism", 1))
            yield from _of_pod(job["template"]["spec"], nodes)
    elif kind == "Job":
        yield from _of_pod(spec["template"]["spec"], int(spec.get("parallelism", 1)))
    elif kind == "Pod":
        yield from _of_pod(spec, 1)


def _of_pod(pod: dict[str, Any], nodes: int) -> Iterator[tuple[int, list[str]]]:
    paths = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod.get("volumes") or ()
        if "hostPath" in volume
    }
    for container in pod["containers"]:
        yield nodes, _container(container, paths)


def _container(container: dict[str, Any], paths: dict[str, str]) -> list[str]:
    """The words, quoted for bash, that start a container of Kubernetes with docker."""
    words = ["docker", "run"]
    resources = container.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    gpus = [str(count) for key, count in asked.items() if key.endswith(("/gpu", "/gpus"))]
    words += ["--gpus", gpus[0]] if gpus else []
    for one in container.get("env") or ():
        if "value" in one:
            words += ["-e", f"{one['name']}={one['value']}"]
    for mount in container.get("volumeMounts") or ():
        if mount["name"] in paths:
            words += ["-v", f"{paths[mount['name']]}:{mount['mountPath']}"]
    words.append(str(container.get("image") or "no-image-named"))
    command = [*(container.get("command") or ()), *(container.get("args") or ())]
    return [shlex.quote(str(word)) for word in [*words, *command]]


def _service(service: dict[str, Any]) -> list[str]:
    """The words, quoted for bash, that start a service of compose with docker."""
    words = ["docker", "run"]
    devices = (service.get("deploy") or {}).get("resources", {}).get("reservations", {})
    for device in devices.get("devices") or ():
        words += ["--gpus", str(device.get("count", "all"))]
    env = service.get("environment") or {}
    pairs = env if isinstance(env, list) else [f"{key}={value}" for key, value in env.items()]
    for pair in pairs:
        words += ["-e", str(pair)]
    for mount in service.get("volumes") or ():
        if isinstance(mount, str):
            words += ["-v", mount]
        elif mount.get("type") == "bind":
            words += ["-v", f"{mount['source']}:{mount['target']}"]
    for key, option in (
        ("shm_size", "--shm-size"),
        ("ipc", "--ipc"),
        ("network_mode", "--network"),
    ):
        words += [option, str(service[key])] if key in service else []
    command = [*_words(service.get("entrypoint")), *_words(service.get("command"))]
    return [
        shlex.quote(word)
        for word in [*words, str(service.get("image") or "no-image-named"), *command]
    ]


def _words(command: object) -> list[str]:
    """A command of compose, which is a list or a line."""
    if isinstance(command, list):
        return [str(word) for word in command]
    return shlex.split(str(command or ""))
