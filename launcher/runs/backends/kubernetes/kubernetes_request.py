"""A plan as a JobSet or a TrainJob of Kubernetes, and its payload as a ConfigMap: pure."""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.base import yamlfile
from launcher.base.errors import Faults
from launcher.base.names import LABEL
from launcher.runs import payload
from launcher.runs.backends import shown
from launcher.runs.backends.docker.docker_request import bytes_of_size
from launcher.runs.backends.kubernetes import kubernetes_pod
from launcher.runs.payload import KEY, TARGET
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.clusters import Kubernetes
from launcher.runs.runfile.secrets import is_secret, redacted

Dict = dict[str, Any]

TEMPLATE = Path(__file__).with_name("kubernetes.yaml.template")

RUN = f"{LABEL}run"
"""The label of all that belongs to a run."""

NODE = "node"
"""What the replicated job and its container are called: Kubeflow's runtimes have no other name."""

HOSTNAME = "kubernetes.io/hostname"
"""The label of a node with its name."""

LONGEST_NAME = 40
"""What leaves room for a pod's number in a host's name of 63 letters."""

END = "YAML"
NAMED, PACKED, AT = "launchpad-payload", "payload.tar.bz2", "/opt/launchpad-payload"
"""The beginning of the ConfigMap's name, its key, and where pods see it."""

UNPACK = (
    "import os, sys, tarfile; tarfile.open(sys.argv[1]).extractall('/'); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)
"""Unpacks the payload and becomes the command behind it."""


@dataclass(frozen=True)
class ObjectRequest:
    """What is asked for: an object as the cluster's API has it, and kubectl's words for where.

    config_map: the name of the ConfigMap that goes with it
    """

    manifest: Dict
    place: tuple[str, ...]
    config_map: str = ""


def request(plan: Plan, asked: Kubernetes, environ: Mapping[str, str]) -> ObjectRequest:
    """The object of `plan`; variables without a value take theirs of `environ`.

    Raises UsageError for what no pod can have, and where a secret's value would stand in it.
    """
    _refuse(plan, asked)
    manifest = _manifest(plan, asked, environ)
    sent = config_map_name(plan) if plan.payload_mount else ""
    return ObjectRequest(manifest, place(asked.context, asked.namespace), sent)


def config_map_name(plan: Plan) -> str:
    """By the payload's digest, so that all runs of one launcher share it."""
    return f"{NAMED}-{dict(plan.labels)[LABEL + KEY]}"


def config_map(plan: Plan, owner: Mapping[str, Any] | None = None) -> Dict:
    """The ConfigMap of the plan's payload: one compressed tar.

    It goes with the last of its owners: `owner` is the object of a run as the cluster has it.
    """
    assert plan.payload_mount
    told: Dict = {"name": config_map_name(plan)}
    if owner:
        named = {name: owner["metadata"][name] for name in ("name", "uid")}
        kinds = {name: owner[name] for name in ("apiVersion", "kind")}
        told["ownerReferences"] = [kinds | named]
    packed = payload.archive(plan.payload_mount.source.removesuffix("/launcher"))
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
        faults.add(f"gpus: {plan.gpus}: the cluster chooses the GPUs", "Give their number.")
    if plan.spare:
        faults.add("nodes.spare: here a job has a fixed number of pods", "Leave it out.")
    if plan.fewer:
        faults.add("nodes.min: here a job starts with all its pods or not at all", "Leave it out.")
    if plan.network not in (None, "host"):
        faults.add(f"resources.network: {plan.network}: a pod uses the cluster's", "Leave it out.")
    if plan.devices:
        remedy = "Use the cluster's name for them: kubernetes.resources: {rdma/ib: 1}."
        faults.add(f"resources.devices: {plan.devices[0]}: the cluster assigns devices", remedy)
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
    for problem, remedy in kubernetes_pod.faults(asked.pod, asked.kind, NODE):
        faults.add(problem, remedy)
    if RUN in ((asked.pod.get("metadata") or {}).get("labels") or {}):
        faults.add(f"kubernetes.pod.metadata.labels.{RUN}: the launcher's own", "Leave it out.")
    faults.refuse()


def _mounts(plan: Plan) -> list[Mount]:
    """What the pods mount; secrets are variables there, and the payload is unpacked."""
    return [one for one in plan.mounts if one.key != KEY and not one.key.startswith("secrets.")]


def _volume(mount: Mount, asked: Kubernetes) -> str | None:
    """The innermost of the folders with a volume that a mount lies in."""
    path = PurePosixPath(mount.source)
    return max((one for one in asked.volumes if path.is_relative_to(one)), key=len, default=None)


def _manifest(plan: Plan, asked: Kubernetes, environ: Mapping[str, str]) -> Dict:
    """The object, by the template beside this module; a key without a value is left out."""
    import jinja2
    import yaml

    environment = jinja2.Environment(
        finalize=yamlfile.inline,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        autoescape=False,  # noqa: S701 - YAML, as `inline` writes it
    )
    volumes, mounts = _volumes(plan, asked)
    user, _, group = (plan.user or "").partition(":")
    text = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        plan=plan,
        asked=asked,
        jobset=asked.kind == "jobset",
        name=object_name(plan),
        node=NODE,
        run_label=RUN,
        annotations=dict(plan.labels),
        image=asked.image or plan.image,
        args=[shown.literal(word) for word in _argv(plan, asked)],
        env=_env(plan, asked, environ),
        limits=_limits(plan, asked),
        requests=_requests(plan, asked),
        capabilities={"add": [*plan.cap_add]} if plan.cap_add else None,
        config_map=config_map_name(plan) if plan.payload_mount else None,
        unpacked_from=AT,
        unpacked_to=TARGET,
        mounts=mounts,
        volumes=volumes,
        shm_size=str(bytes_of_size(plan.shm_size)) if plan.shm_size else None,
        user=int(user) if user else None,
        group=int(group) if group else None,
        pull_secrets=[{"name": name} for name in asked.image_pull_secrets],
        tolerations=[one.model_dump() for one in asked.tolerations],
    )
    manifest = dict(_given(yaml.safe_load(text)))
    job = _job_of(manifest, asked.kind)
    job["template"] = kubernetes_pod.merged(job["template"], asked.pod, NODE)
    if isinstance(asked.exclude, list):
        _leave_out(asked.exclude, job["template"]["spec"])
    return manifest


def _job_of(manifest: Dict, kind: str) -> Dict:
    """What holds the pod's template in an object."""
    spec: Dict = manifest["spec"]
    if kind == "trainjob":
        spec = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    found: Dict = spec["replicatedJobs"][0]["template"]["spec"]
    return found


def _leave_out(hosts: list[str], spec: Dict) -> None:
    """Keep a pod from nodes: of its terms, of which one will do, each is to."""
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    affinity = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
    terms = affinity.setdefault(required, {}).setdefault("nodeSelectorTerms", [{}])
    others = {"key": HOSTNAME, "operator": "NotIn", "values": hosts}
    for term in terms:
        term["matchExpressions"] = [*term.get("matchExpressions", []), others]


def _given(value: Any) -> Any:
    """`value` without the keys that are null, at any depth."""
    if isinstance(value, dict):
        return {key: _given(inner) for key, inner in value.items() if inner is not None}
    return [_given(inner) for inner in value] if isinstance(value, list) else value


def _volumes(plan: Plan, asked: Kubernetes) -> tuple[list[Dict], list[Dict]]:
    """The volumes, each once, and where they are mounted: a path on a claim is a part of it."""
    volumes: dict[str, Dict] = {}
    mounts: list[Dict] = []
    for mount in _mounts(plan):
        root = _volume(mount, asked)
        assert root is not None
        volume, part = asked.volumes[root], relpath(mount.source, root)
        name = f"volume-{[*asked.volumes].index(root)}"
        claim, path = {"claimName": volume.claim}, {"path": volume.host_path}
        lies = {"persistentVolumeClaim": claim} if volume.claim else {"hostPath": path}
        volumes[root] = {"name": name, **lies}
        place = {"name": name, "mountPath": mount.target, "subPath": part if part != "." else None}
        mounts.append(place | {"readOnly": mount.read_only or None})
    return [*volumes.values()], mounts


def _limits(plan: Plan, asked: Kubernetes) -> Dict:
    """What each node has to itself, as limits, which are its requests as well."""
    limits = {name: str(value) for name, value in sorted(asked.resources.items())}
    limits[asked.gpu] = str(plan.gpus.count or "")
    limits["memory"] = str(bytes_of_size(plan.memory)) if plan.memory else ""
    return shown.filled(limits)


def _requests(plan: Plan, asked: Kubernetes) -> Dict:
    """What each node asks for with its GPUs; without it a pod gets what others leave."""
    found = {}
    for name, quantity in asked.per_gpu.items() if plan.gpus.count else ():
        number, unit = re.fullmatch(r"([\d.]+)(\D*)", quantity).groups()  # type: ignore[union-attr]
        found[name] = f"{float(number) * (plan.gpus.count or 0):g}{unit}"
    return found


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


def _argv(plan: Plan, asked: Kubernetes) -> tuple[str, ...]:
    """What the image's entry point is given, which goes on where the cluster starts it again.

    A TrainJob's trainer has no working directory: `env` changes to it.
    """
    if asked.kind == "trainjob" and plan.workdir:
        return ("env", f"--chdir={plan.workdir}", *_unpacking(plan), *plan.argv)
    argv = (*_unpacking(plan), *plan.argv)
    if not (saved := shown.goes_on_from(plan, "kubernetes.restarts") if asked.restarts else ""):
        return argv
    again = f'[ "$RESTART" -eq 0 ] || set -- "$@" --load {shlex.quote(saved)}; exec "$@"'
    return ("sh", "-c", again, "sh", *argv)


def _unpacking(plan: Plan) -> tuple[str, ...]:
    """The words before a command that unpack the payload for it."""
    return (plan.argv[0], "-c", UNPACK, f"{AT}/{PACKED}") if plan.payload_mount else ()


def show(plan: Plan, asked: ObjectRequest, *, full: bool = False) -> str:
    """The `kubectl` that creates the object, which works when pasted into a shell.

    Where `full`, so does the one before it, for the payload: else that is named alone.
    """
    created = _pasted([*asked.place, "create"], asked.manifest)
    if not asked.config_map:
        return created
    if not full:
        return f"# needs the ConfigMap {asked.config_map}, which --full shows as well\n{created}"
    return _pasted([*asked.place, "apply", "--server-side"], config_map(plan)) + created


def _pasted(words: list[str], manifest: Dict) -> str:
    """A `kubectl` with what it reads."""
    text = yamlfile.dump(manifest, width=100)
    return f"{shlex.join(['kubectl', *words, '--filename=-'])} <<'{END}'\n{text}{END}\n"
