"""A plan as a JobSet or a TrainJob of Kubernetes, and its payload as a ConfigMap: pure."""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import PurePosixPath
from typing import Any

from launcher.base.errors import Faults
from launcher.base.names import LABEL
from launcher.runs import payload
from launcher.runs.backends import shown
from launcher.runs.backends.docker.docker_request import bytes_of_size
from launcher.runs.payload import KEY, TARGET
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.clusters import Kubernetes
from launcher.runs.runfile.secrets import is_secret, redacted

Dict = dict[str, Any]

RUN = f"{LABEL}run"
"""The label of all that belongs to a run."""

NODE = "node"
"""What the replicated job and its container are called: Kubeflow's runtimes have no other name."""

LONGEST_NAME = 40
"""What leaves room for a pod's number in a host's name of 63 letters."""

PORT = 29500
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
RESTART = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
QUEUE = "kueue.x-k8s.io/queue-name"
MANAGER = "megatron-launchpad/launcher"
END = "YAML"
NAMED, PACKED, AT = "launchpad-payload", "payload.tar.gz", "/opt/launchpad-payload"
"""The beginning of the ConfigMap's name, its key, and where pods see it."""

UNPACK = (
    "import os, sys, tarfile; tarfile.open(sys.argv[1]).extractall('/'); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Unpacks the payload and becomes the command behind it."""


@dataclass(frozen=True)
class ObjectRequest:
    """What is asked for: an object as the cluster's API has it, and kubectl's words for where.

    payload: the name of the ConfigMap that goes with it
    """

    manifest: Dict
    place: tuple[str, ...]
    payload: str = ""


def request(plan: Plan, asked: Kubernetes, environ: Mapping[str, str]) -> ObjectRequest:
    """The object of `plan`; variables without a value take theirs of `environ`.

    Raises UsageError for what no pod can have, and where a secret's value would stand in it.
    """
    _refuse(plan, asked)
    version, kind, spec = (_trainjob if asked.kind == "trainjob" else _jobset)(plan, asked, environ)
    name, labels = object_name(plan), shown.filled({RUN: plan.run, QUEUE: asked.queue})
    told = {"name": name, "namespace": asked.namespace, "labels": labels}
    told = shown.filled(told | {"annotations": dict(plan.labels)})
    manifest = {"apiVersion": version, "kind": kind, "metadata": told, "spec": spec}
    sent = config_map_name(plan) if plan.payload else ""
    return ObjectRequest(manifest, place(asked.context, asked.namespace), sent)


def config_map_name(plan: Plan) -> str:
    """By the payload's digest, so that all runs of one launcher share it."""
    return f"{NAMED}-{dict(plan.labels)[LABEL + KEY]}"


def config_map(plan: Plan, owner: Mapping[str, Any] | None = None) -> Dict:
    """The ConfigMap of the plan's payload: one compressed tar.

    It goes with the last of its owners: `owner` is the object of a run as the cluster has it.
    """
    assert plan.payload
    told: Dict = {"name": config_map_name(plan)}
    if owner:
        named = {name: owner["metadata"][name] for name in ("name", "uid")}
        kinds = {name: owner[name] for name in ("apiVersion", "kind")}
        told["ownerReferences"] = [kinds | named]
    packed = payload.archive(plan.payload.source.removesuffix("/launcher"))
    data = {PACKED: b64encode(packed).decode()}
    fixed = {"apiVersion": "v1", "kind": "ConfigMap", "immutable": True}
    return {**fixed, "metadata": told, "binaryData": data}


def place(context: str | None, namespace: str | None) -> tuple[str, ...]:
    """kubectl's words for a cluster and a namespace of it."""
    told = {"context": context, "namespace": namespace}
    return tuple(f"--{name}={value}" for name, value in told.items() if value)


def object_name(plan: Plan) -> str:
    """The run's name as a host's name may be, which begins with a letter, and its id."""
    name = re.sub("[^a-z0-9]+", "-", plan.name.lower()).strip("-")
    name = name if name[:1].isalpha() else f"run-{name}".rstrip("-")
    return f"{name[: LONGEST_NAME - 1 - len(plan.run)].rstrip('-')}-{plan.run}"


def _refuse(plan: Plan, asked: Kubernetes) -> None:
    faults = Faults()
    if plan.gpus.devices:
        faults.add(f"gpus: {plan.gpus}: the cluster chooses which", "Give their number.")
    if plan.fewer:
        faults.add("nodes.min: a job has all its pods or none here", "Leave it out.")
    if plan.network not in (None, "host"):
        faults.add(f"resources.network: {plan.network}: a pod has the cluster's", "Leave it out.")
    if redacted(plan.argv) != plan.argv:
        faults.add("a secret among the program's arguments would stand in the cluster's objects")
    values = [name for name, value in plan.env if value is None or is_secret(name, value)]
    named = [f"env.{name}" for name in values if is_secret(name)]
    named += [f"secrets.{name}" for name, _ in plan.secrets]
    for key in named:
        name = key.partition(".")[2]
        if name not in asked.secrets:
            remedy = f"kubernetes.secrets: {{{name}: SECRET/KEY}}, of a Secret of the cluster."
            faults.add(f"{key}: a secret's value isn't written into the cluster's objects", remedy)
    for mount in _mounts(plan):
        if _volume(mount, asked) is None:
            faults.add(
                f"{mount.key}: {mount.source} is in none of kubernetes.volumes",
                "Say where it lies: kubernetes.volumes: {/shared: {claim: NAME}}, or host_path.",
            )
    faults.refuse()


def _mounts(plan: Plan) -> list[Mount]:
    """What the pods mount; secrets are variables there, and the payload is unpacked."""
    return [one for one in plan.mounts if one.key != KEY and not one.key.startswith("secrets.")]


def _volume(mount: Mount, asked: Kubernetes) -> str | None:
    """The innermost of the folders with a volume that a mount lies in."""
    path = PurePosixPath(mount.source)
    return max((one for one in asked.volumes if path.is_relative_to(one)), key=len, default=None)


def _jobset(plan: Plan, asked: Kubernetes, environ: Mapping[str, str]) -> tuple[str, str, Dict]:
    """The API, the kind and its specification, which gives the rendezvous."""
    pod = _pod(plan, asked)
    container = {
        "image": asked.image or plan.image,
        "args": [shown.literal(word) for word in _argv(plan, asked)],
        "env": _env(plan, asked, environ) + _rendezvous(plan, asked),
        **({"workingDir": plan.workdir} if plan.workdir else {}),
        "resources": _resources(plan, asked),
    }
    pod["containers"][0] |= container
    pod |= {"restartPolicy": "Never", "enableServiceLinks": False}
    pod["automountServiceAccountToken"] = asked.service_account is not None
    pod |= shown.filled({"priorityClassName": asked.priority_class})
    template = {"metadata": {"labels": {RUN: plan.run}}, "spec": pod}
    nodes = {"completions": plan.nodes, "parallelism": plan.nodes, "completionMode": "Indexed"}
    job = {"backoffLimit": 0, **nodes, "template": template}
    spec = {
        "failurePolicy": {"maxRestarts": asked.restarts},
        "network": {"enableDNSHostnames": True},
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
    }
    return "jobset.x-k8s.io/v1alpha2", "JobSet", spec


def _trainjob(plan: Plan, asked: Kubernetes, environ: Mapping[str, str]) -> tuple[str, str, Dict]:
    """It says what a runtime leaves open; that gives the rendezvous, by PET_*."""
    there = ["env", f"--chdir={plan.workdir}"] if plan.workdir else []
    template = {"metadata": {"labels": {RUN: plan.run}}, "spec": _pod(plan, asked)}
    jobs = [{"name": NODE, "template": {"spec": {"template": template}}}]
    patched = {"template": {"spec": {"replicatedJobs": jobs}}}
    spec = {
        "runtimeRef": {"name": asked.runtime},
        "trainer": {
            "image": asked.image or plan.image,
            "args": [shown.literal(word) for word in (*there, *_unpacking(plan), *plan.argv)],
            "numNodes": plan.nodes,
            "env": _env(plan, asked, environ),
            "resourcesPerNode": _resources(plan, asked),
        },
        "runtimePatches": [{"manager": MANAGER, "trainingRuntimeSpec": patched}],
    }
    return "trainer.kubeflow.org/v1alpha1", "TrainJob", spec


def _pod(plan: Plan, asked: Kubernetes) -> Dict:
    """What of a pod both kinds have: no more privilege than docker gives, and shared memory."""
    volumes, mounts = _volumes(plan, asked)
    user, _, group = (plan.user or "").partition(":")
    security = {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsUser": int(user) if user else None,
        "runAsGroup": int(group) if group else None,
        "supplementalGroups": list(plan.groups),
    }
    container = {
        "name": NODE,
        "securityContext": {"allowPrivilegeEscalation": not plan.no_new_privileges},
        "volumeMounts": mounts,
    }
    pod: Dict = {
        "containers": [container],
        "volumes": volumes,
        "securityContext": shown.filled(security),
        "terminationGracePeriodSeconds": plan.stop_grace,
        "imagePullSecrets": [{"name": name} for name in asked.image_pull_secrets],
        "serviceAccountName": asked.service_account,
        "nodeSelector": dict(asked.node_selector),
        "tolerations": [one.model_dump(exclude_none=True) for one in asked.tolerations],
    }
    return shown.filled(pod)


def _volumes(plan: Plan, asked: Kubernetes) -> tuple[list[Dict], list[Dict]]:
    """The volumes, each once, and where they are mounted: a path on a claim is a part of it."""
    size = str(bytes_of_size(plan.shm_size)) if plan.shm_size else None
    shm = shown.filled({"medium": "Memory", "sizeLimit": size})
    volumes: dict[str, Dict] = {"": {"name": "shm", "emptyDir": shm}}
    mounts: list[Dict] = [{"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108 - the pod's
    if plan.payload:
        volumes[AT] = {"name": "payload", "configMap": {"name": config_map_name(plan)}}
        volumes[TARGET] = {"name": "launchpad", "emptyDir": {}}
        mounts += [{"name": "payload", "mountPath": AT, "readOnly": True}]
        mounts += [{"name": "launchpad", "mountPath": TARGET}]
    for mount in _mounts(plan):
        root = _volume(mount, asked)
        assert root is not None
        volume, part = asked.volumes[root], relpath(mount.source, root)
        name = f"volume-{[*asked.volumes].index(root)}"
        claim, path = {"claimName": volume.claim}, {"path": volume.host_path}
        lies = {"persistentVolumeClaim": claim} if volume.claim else {"hostPath": path}
        volumes[root] = {"name": name, **lies}
        place = {"name": name, "mountPath": mount.target, "subPath": part if part != "." else None}
        mounts.append(shown.filled(place | {"readOnly": mount.read_only or None}))
    return [*volumes.values()], mounts


def _resources(plan: Plan, asked: Kubernetes) -> Dict:
    """What each node has to itself, as limits, which are its requests as well."""
    limits = {name: str(value) for name, value in sorted(asked.resources.items())}
    limits[asked.gpu] = str(plan.gpus.count or "")
    limits["memory"] = str(bytes_of_size(plan.memory)) if plan.memory else ""
    return shown.filled({"limits": shown.filled(limits)})


def _env(plan: Plan, asked: Kubernetes, environ: Mapping[str, str]) -> list[Dict]:
    """The variables; secrets by reference."""
    values = {name: environ.get(name) if v is None else v for name, v in plan.env}
    named: list[Dict] = [
        {"name": name, "value": shown.literal(value)}
        for name, value in values.items()
        if value is not None and name not in asked.secrets
    ]
    for name, reference in sorted(asked.secrets.items()):
        secret, _, key = reference.partition("/")
        named.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return named


def _rendezvous(plan: Plan, asked: Kubernetes) -> list[Dict]:
    """Which node it is, by the index of its pod, and the first one's name in the cluster."""
    variables: list[Dict] = []
    if plan.nodes > 1:
        name = object_name(plan)
        first = f"{name}-{NODE}-0-0.{name}"
        values = {"NNODES": plan.nodes, "MASTER_ADDR": first, "MASTER_PORT": PORT}
        variables = [{"name": f"PET_{name}", "value": str(v)} for name, v in values.items()]
        variables.append(_field("PET_NODE_RANK", INDEX))
    return [*variables, _field("RESTART", RESTART)] if asked.restarts else variables


def _field(name: str, path: str) -> Dict:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _argv(plan: Plan, asked: Kubernetes) -> tuple[str, ...]:
    """What the image's entry point is given, which goes on where the cluster starts it again."""
    again = shown.going_on(plan, "kubernetes.restarts", "RESTART") if asked.restarts else ""
    argv = (*_unpacking(plan), *plan.argv)
    return ("sh", "-c", f'exec "$@"{again}', "sh", *argv) if again else argv


def _unpacking(plan: Plan) -> tuple[str, ...]:
    """The words before a command that unpack the payload for it."""
    return (plan.argv[0], "-c", UNPACK, f"{AT}/{PACKED}") if plan.payload else ()


def show(plan: Plan, asked: ObjectRequest, *, full: bool = False) -> str:
    """The `kubectl` that creates the object, which works when pasted into a shell.

    Where `full`, so does the one before it, for the payload: else that is named alone.
    """
    created = _pasted([*asked.place, "create"], asked.manifest)
    if not asked.payload:
        return created
    if not full:
        return f"# needs the ConfigMap {asked.payload}, which --full shows as well\n{created}"
    return _pasted([*asked.place, "apply", "--server-side"], config_map(plan)) + created


def _pasted(words: list[str], manifest: Dict) -> str:
    """A `kubectl` with what it reads."""
    import yaml

    from launcher.base.yamlfile import PortableDumper

    how: dict[str, Any] = {"sort_keys": False, "width": 100, "allow_unicode": True}
    text = yaml.dump(manifest, Dumper=PortableDumper, **how)
    return f"{shlex.join(['kubectl', *words, '--filename=-'])} <<'{END}'\n{text}{END}\n"
