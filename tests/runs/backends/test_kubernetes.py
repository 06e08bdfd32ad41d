"""A plan as a JobSet or a TrainJob: the objects, which a stand-in takes in tests/e2e."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.base.errors import UsageError
from launcher.runs.backends import backend, shown
from launcher.runs.backends.kubernetes import kubernetes_job, kubernetes_pod, kubernetes_request
from launcher.runs.follow.assemble import assemble, new_stamp
from launcher.runs.plan.job import EndCause, ExitStatus
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile import origins
from launcher.runs.runfile.clusters import Kubernetes
from launcher.runs.runfile.origins import RunRequest
from tests.e2e.site import program
from tests.plans import HOST, Planner
from tests.tables import table
from tools import podmodel

from .test_docker import kept

RUN = """\
name: GPT_2.small
image: {name: "megatron:24.10-0.16.1", megatron: "0.16.1"}
gpus: 8
nodes: 2
program: /shared/train.py
checkpoint: {save: /shared/save}
env: {WANDB_API_KEY: null, PRICE: "a $(HOME) $$", UNSET: null}
secrets: {HF_TOKEN: /home/user/token}
mounts: [{source: /scratch/in, target: /in}, {source: /shared, target: /all, read_only: false}]
resources: {memory: 512m, ipc: private, shm_size: 1g}
"""
ASKED: dict[str, Any] = {
    "namespace": "team-a",
    "context": "some where",
    "image": "registry.example/megatron:1",
    "image_pull_secrets": ["registry"],
    "service_account": "trainer",
    "node_selector": {"gpu": "h100"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "queue": "team-a",
    "volumes": {"/shared": {"claim": "training"}, "/scratch": {"host_path": "/mnt"}},
    "secrets": {"WANDB_API_KEY": "wandb/api-key", "HF_TOKEN": "hugging-face/token"},
    "resources": {"rdma/ib": "1"},
    "per_gpu": {"cpu": 12, "memory": "180Gi"},
    "exclude": ["bad-1", "bad-2"],
}
LOCKS = {"securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
POD: dict[str, Any] = {
    "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"}, "labels": {"team": "a"}},
    "spec": {
        "containers": [{**LOCKS, "volumeMounts": [{"name": "shm", "mountPath": "/shm-too"}]}],
        "tolerations": [{"key": "team", "operator": "Exists"}],
    },
}
TOPOLOGY = {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway"}
WHOLE = POD | {"spec": POD["spec"] | {"hostNetwork": True, "topologySpreadConstraints": [TOPOLOGY]}}
KINDS = {
    "jobset": ASKED | {"priority_class": "high", "restarts": 2, "pod": WHOLE},
    "trainjob": ASKED | {"kind": "trainjob", "pod": POD},
}


@pytest.fixture
def full(plan: Planner) -> Plan:
    return plan(RUN, host=replace(HOST, scheduled=True, groups=(44,)))


def asked(**keys: Any) -> Kubernetes:
    return Kubernetes.model_validate(keys)


def made(plan: Plan, **keys: Any) -> dict[str, Any]:
    return kubernetes_request.request(plan, asked(**keys), {}).manifest


def pod(plan: Plan, **keys: Any) -> dict[str, Any]:
    """The pod of a JobSet."""
    return _pod(made(plan, **keys)["spec"])


def _pod(spec: dict[str, Any]) -> dict[str, Any]:
    return dict(spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_object(full: Plan, kind: str) -> None:
    asked_for = kubernetes_request.request(full, asked(**KINDS[kind]), {})
    shown = kubernetes_request.show(full, asked_for)
    kept(f"kubernetes-{kind}.txt", shown)
    assert yaml.safe_load("\n".join(shown.splitlines()[2:-1])) == asked_for.manifest


@pytest.mark.parametrize("kind", KINDS)
def test_the_published_models_know_every_field(full: Plan, kind: str) -> None:
    """They drop what they don't know without a word, as a cluster does."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    names = {"jobset": "JobsetV1alpha2JobSet", "trainjob": "TrainerV1alpha1TrainJob"}
    manifest = made(full, **KINDS[kind])
    model = getattr(models, names[kind]).from_dict(manifest)
    assert pruned(model.to_dict()) == pruned(manifest)


def pruned(value: Any) -> Any:
    """Without what is null or empty, which a model may add."""
    if isinstance(value, dict):
        found = {key: pruned(inner) for key, inner in value.items()}
        return {key: inner for key, inner in found.items() if inner not in (None, {}, [])}
    return [pruned(inner) for inner in value] if isinstance(value, list) else value


def test_the_fields_of_a_pod_are_those_that_are_published() -> None:
    """A field of a newer Kubernetes would be refused; `python -m tools.podmodel` writes them."""
    pytest.importorskip("kubeflow_trainer_api.models")
    assert kubernetes_pod.TABLE.read_text() == podmodel.text()


SECRET = {"name": "DB_PASSWORD", "value": "0123456789"}


@pytest.mark.parametrize(
    ("kind", "overlay", "told"),
    [
        (
            "jobset",
            {"spec": {"hostNetwrk": True}},
            r"spec.hostNetwrk: a pod has no.*\n.*hostNetwork",
        ),
        ("trainjob", {"spec": {"hostNetwork": True}}, "spec.hostNetwork: a pod has no such field"),
        ("jobset", {"spec": {"hostNetwork": "true"}}, "hostNetwork: 'true' is no boolean"),
        ("jobset", {"spec": {"containers": LOCKS}}, "spec.containers: takes a list"),
        ("jobset", {"spec": {"affinity": ["a"]}}, "spec.affinity: takes keys"),
        ("jobset", {"spec": {"nodeSelector": {"a": 1}}}, "nodeSelector.a: 1 is no string"),
        ("jobset", {"spec": {"containers": [{"image": "a"}]}}, "the container's image follows"),
        (
            "jobset",
            {"spec": {"containers": [{"env": [SECRET]}]}},
            "env DB_PASSWORD: a secret's value",
        ),
        (
            "jobset",
            {"spec": {"initContainers": [{"name": "a", "env": [SECRET]}]}},
            "env DB_PASSWORD: a secret's value",
        ),
        ("jobset", {"spec": None}, "pod.spec: takes keys"),
        ("jobset", {"spec": {"containers": [{"env": None}]}}, "env: takes a list"),
        ("jobset", {"spec": {"containers": [None]}}, "containers.0: takes keys"),
        ("jobset", {"spec": {"containers": [{"name": None, "image": "a"}]}}, "image follows"),
        ("jobset", {"metadata": {"labels": {kubernetes_request.RUN: "x"}}}, "run: the launcher's"),
    ],
)
def test_what_a_pod_has_not_is_refused(
    full: Plan, kind: str, overlay: dict[str, Any], told: str
) -> None:
    """A cluster drops a field that it doesn't know without a word."""
    with pytest.raises(UsageError, match=told):
        made(full, **ASKED | {"kind": kind, "pod": overlay})


def test_an_overlay_is_merged_by_names(full: Plan) -> None:
    """A container without a name was one more, and ours had no right to lock memory."""
    sidecar = {"name": "metrics", "image": "exporter:1"}
    referred = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b"}}}
    spec = POD["spec"] | {"containers": [LOCKS | {"env": [referred]}, sidecar]}
    found = pod(full, **KINDS["jobset"] | {"pod": {"spec": spec}})
    ours, other = found["containers"]
    assert other == sidecar
    assert ours["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert ours["securityContext"]["allowPrivilegeEscalation"] is False
    assert [one for one in ours["env"] if one["name"] == "HF_TOKEN"] == [referred]
    assert [one["key"] for one in found["tolerations"]] == ["nvidia.com/gpu", "team"]
    assert ours["resources"]["requests"] == {"cpu": "96", "memory": "1440Gi"}


def test_nodes_stay_left_out_beside_an_affinity_of_the_files_own(full: Plan) -> None:
    """Of a pod's terms one will do: a second one of ours let it onto the bad node."""
    rack = {"key": "rack", "operator": "In", "values": ["a"]}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rack]}, {}]}
    spec = {"affinity": {"nodeAffinity": {required: terms}}}
    found = pod(full, **ASKED, pod={"spec": spec})["affinity"]["nodeAffinity"][required]
    out = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["bad-1", "bad-2"]}
    expressions = [one["matchExpressions"] for one in found["nodeSelectorTerms"]]
    assert expressions == [[rack, out], [out]]


def test_a_node_that_was_just_found_is_asked_by_its_pods_name(
    full: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `stacks` and `stop` do, which haven't looked at the run before; kubectl is a stand-in."""
    index = {"batch.kubernetes.io/job-completion-index": "1"}
    pod = {"kind": "Pod", "metadata": {"name": "its-pod-x7k2p", "annotations": index}}
    found = [made(full, **KINDS["jobset"]), pod]
    (tmp_path / "all.json").write_text(json.dumps({"items": found}))
    (tmp_path / "jobsets.json").write_text(json.dumps({"items": found[:1]}))
    program(
        tmp_path / "kubectl",
        '#!/bin/sh\nhere=$(dirname "$0")\ncase "$*" in\n*,pods*) cat "$here/all.json" ;;\n'
        '*" get "*) cat "$here/jobsets.json" ;;\n'
        '*) echo "$*" >> "$here/asked"; tar -C "$here" -cf - all.json ;;\nesac\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / full.run).mkdir()
    kept = {"kind": "JobSet", "place": ["--namespace=team-a"]}
    (tmp_path / full.run / "kubernetes.json").write_text(json.dumps(kept))
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    (job,) = kubernetes_job.jobs()
    assert job.run == full.run
    assert "all.json" in job.nodes[1].diagnose()
    asked = (tmp_path / "asked").read_text()
    assert asked.startswith("--namespace=team-a exec its-pod-x7k2p --container=node -- python3 ")


RUNNING: dict[str, Any] = {"running": {}}


def ended(code: int, **more: Any) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "finishedAt": "2025-01-02T03:04:05Z", **more}}


def status(state: dict[str, Any]) -> dict[str, Any]:
    """A pod whose container is in such a state."""
    return {"status": {"containerStatuses": [{"name": "node", "state": state}]}}


def owner(condition: str = "", restarts: int = 0) -> dict[str, Any]:
    conditions = [{"type": condition, "status": "True"}] if condition else []
    told = {"spec": {"failurePolicy": {"maxRestarts": restarts}}}
    return told | {"status": {"conditions": conditions}}


def job_of(owner: dict[str, Any] | None) -> kubernetes_job.KubernetesJob:
    """A run of two nodes whose cluster isn't asked again."""
    asked = {"asked_at": math.inf, "owner": owner}
    seen = kubernetes_job.ClusterQuery(kubernetes_job.Cluster(()), "JobSet", "0a1b2c3d", **asked)
    nodes = tuple(kubernetes_job.PodJob(seen, "a", rank, {}) for rank in (0, 1))
    return kubernetes_job.KubernetesJob(nodes, {}, seen=seen, name="a")


@pytest.mark.parametrize(
    ("before", "now", "of", "told"),
    [
        ([RUNNING, RUNNING], [ended(0), ended(0)], owner(), 0),
        ([RUNNING, RUNNING], [ended(0), RUNNING], owner(), None),
        ([RUNNING, RUNNING], [ended(3), None], owner(), None),
        ([RUNNING, RUNNING], [ended(3), None], owner("Failed"), 3),
        ([RUNNING, RUNNING], [ended(3), RUNNING], owner("Failed"), None),
        ([RUNNING, RUNNING], [ended(0), None], owner(restarts=1), None),
        ([RUNNING, RUNNING], [ended(3), None], owner(restarts=1), None),
        ([RUNNING, RUNNING], [None, None], owner(restarts=1), None),
        ([RUNNING, RUNNING], [ended(3), ended(3)], owner("Failed", 1), 3),
        ([RUNNING, RUNNING], [None, None], owner("Completed"), 0),
        ([None, None], [None, None], owner("Failed"), 137),
        ([None, None], [None, None], owner(), None),
        ([RUNNING, RUNNING], [ended(0), ended(0)], None, 137),
    ],
)
def test_how_a_run_has_ended(before: Any, now: Any, of: Any, told: int | None) -> None:
    """A pod that the cluster replaces, or that has gone already, isn't one that never started."""
    job = job_of(of)
    for states in (before, now):
        pods = {n: status(state) for n, state in enumerate(states) if state}
        job.seen.pods = {n: pod | {"metadata": {"name": f"a-{n}"}} for n, pod in pods.items()}
        job.logs = {"a-0": "", "a-1": ""}
        job.look()
    found = job.ended()
    assert (found and found.code) == told


def test_an_end_names_the_machines_of_its_pods() -> None:
    """`exclude: auto` is to leave out a machine, and a pod's own name says nothing of it."""
    job = job_of(owner("Failed"))
    named = {"spec": {"nodeName": "gpu-7"}, "metadata": {"name": "a-1"}}
    job.seen.pods, job.logs = {1: status(ended(3)) | named}, {"a-1": ""}
    found = job.ended()
    assert found
    assert found.hosts == ("", "gpu-7")


STARTED_AGAIN = {"name": "node", "lastState": ended(3), "state": RUNNING}
EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "disk pressure"}


@pytest.mark.parametrize(
    ("pod", "told"),
    [
        ({"status": {"containerStatuses": [STARTED_AGAIN]}}, ExitStatus(3)),
        (status(ended(137, reason="OOMKilled")), ExitStatus(137, EndCause.MEMORY)),
        ({"status": EVICTED}, ExitStatus(137, why="Evicted: disk pressure")),
    ],
    ids=["started again in its place", "killed for memory", "evicted"],
)
def test_how_a_pod_has_ended(pod: dict[str, Any], told: ExitStatus) -> None:
    found = kubernetes_job._ended(pod)
    assert found
    assert found.ended == told


def test_what_is_pasted_is_the_object(full: Plan, tmp_path: Path) -> None:
    """The marker's quotes keep the shell from the `$` of values."""
    text = '#!/bin/sh\nprintf "%s\\n" "$@" > "$0.argv"\ncat > "$0.in"\n'
    program(tmp_path / "kubectl", text)
    asked_for = kubernetes_request.request(full, asked(**KINDS["jobset"]), {})
    shown = kubernetes_request.show(full, asked_for)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", "-c", shown], env=env, check=True, timeout=300)
    assert yaml.safe_load((tmp_path / "kubectl.in").read_text()) == asked_for.manifest
    words = (tmp_path / "kubectl.argv").read_text().splitlines()
    assert words == ["--context=some where", "--namespace=team-a", "create", "--filename=-"]


def test_a_value_is_nothing_but_a_value(full: Plan) -> None:
    """Of YAML and of Jinja: one without quotes becomes another type, a comment or other keys."""
    words = ["yes", "a, b: c", "#", "{{ node }}", "]}", "'\"\n\t", "\x85\u2028😀", "- a", "", "1e5"]
    env = (*((f"V{at}", word) for at, word in enumerate(words)), ("LAST", " "))
    for kind, keys in KINDS.items():
        spec = made(replace(full.without_payload(), argv=tuple(words), env=env), **keys)["spec"]
        given = spec["trainer"] if kind == "trainjob" else _pod(spec)["containers"][0]
        assert given["args"][-len(words) :] == words
        assert [one["value"] for one in given["env"][: len(env)]] == [*words, " "]


def test_a_preset_that_wants_no_network_runs_in_a_cluster(tmp_path: Path) -> None:
    """gpt2-tiny, the first one that people try, was refused; a user's own wish is not dropped."""
    chosen = backend("kubernetes")
    preset, own = origins.load("gpt2-tiny", []), tmp_path / "own.yaml"
    own.write_text("extends: gpt2-tiny\nresources: {network: none}\n")
    networks = [
        assemble(RunRequest(*found, "/"), chosen, new_stamp(), dry=True).plan.network
        for found in (preset, origins.load(str(own), []))
    ]
    assert networks == [None, "none"]


@table("text", "keys", "told")
def test_what_no_pod_can_have_is_refused(
    plan: Planner, text: str, keys: dict[str, Any], told: str
) -> None:
    before, _, after = text.partition("|")
    run = plan(RUN.replace(before, after, 1) if text else RUN, host=replace(HOST, scheduled=True))
    given = ASKED | keys | ({} if keys or text else {"volumes": {"/scratch": {"claim": "a"}}})
    with pytest.raises(UsageError, match=told):
        made(run, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_no_secrets_value_is_in_it(full: Plan, kind: str) -> None:
    """Of the launcher's own variables and of the file's, those that a reference takes the place of
    are left out."""
    env = (*full.env, ("DB_PASSWORD", "0123456789"))
    keys = KINDS[kind] | {"secrets": ASKED["secrets"] | {"DB_PASSWORD": "db/password"}}
    environ = {"WANDB_API_KEY": "abcdefghij", "UNSET": "set after all"}
    made = kubernetes_request.request(replace(full, env=env), asked(**keys), environ)
    told = kubernetes_request.show(full, made)
    assert [one for one in ("0123456789", "abcdefghij", "/run/secrets") if one in told] == []
    assert "set after all" in told
    argued = replace(full, env=env, argv=("program", "--api-key", "0123456789"))
    with pytest.raises(UsageError, match="a secret among the program's arguments"):
        kubernetes_request.request(argued, asked(**keys), environ)


@given(words=st.lists(st.text("ab$()\\ '\"{}", max_size=8), max_size=4))
def test_a_pod_expands_nothing_in_words(words: list[str]) -> None:
    """By Kubernetes' rules: $$ is a dollar, and $(NAME) a variable's value where there is one."""
    assert [expanded(shown.literal(word)) for word in words] == words


def expanded(text: str) -> str:
    return re.sub(r"\$\$|\$\(([^)]*)\)", lambda m: "$" if m[0] == "$$" else "expanded", text)


def test_a_run_that_the_cluster_starts_again_loads_what_it_saved(full: Plan) -> None:
    command = [expanded(word) for word in pod(full, **KINDS["jobset"])["containers"][0]["args"]]
    assert command[:2] == ["sh", "-c"]
    for restart, more in (("0", []), ("1", ["--load", "/checkpoints"])):
        words = ["sh", "-c", command[2], "sh", "printf", r"%s\n", "a b"]
        asked = subprocess.run(words, env={"RESTART": restart}, capture_output=True, timeout=300)
        assert asked.stdout.decode().splitlines() == ["a b", *more], shlex.join(words)
    bare = pod(full, **ASKED | {"service_account": None})
    assert bare["automountServiceAccountToken"] is False  # a pod's default is a token
    unpack = ["python3", "-c", kubernetes_request.UNPACK, "/opt/launchpad-payload/payload.tar.bz2"]
    told = [shown.literal(word) for word in (*unpack, *full.argv)]
    assert bare["containers"][0]["args"] == told


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("GPT_2.small", "gpt-2-small-0a1b2c3d"),
        ("7b", "run-7b-0a1b2c3d"),
        ("a" * 60, "a" * 31 + "-0a1b2c3d"),
        ("...", "run-0a1b2c3d"),
    ],
)
def test_names_are_a_hosts(full: Plan, name: str, told: str) -> None:
    found = kubernetes_request.object_name(replace(full, name=name))
    assert found == told
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", f"{found}-node-0-511")
    assert len(f"{found}-node-0-511") <= 63


def test_the_innermost_volume_counts(full: Plan) -> None:
    mounts = (Mount("/shared/a/b", "/b", True, "mounts"), Mount("/shared/ab", "/c", True, "mounts"))
    keys = ASKED | {"volumes": {"/shared": {"claim": "all"}, "/shared/a": {"claim": "one"}}}
    found = pod(replace(full, mounts=mounts), **keys)
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in found["volumes"][1:]}
    places = found["containers"][0]["volumeMounts"][1:]
    told = [(claims[one["name"]], one["subPath"], one["mountPath"]) for one in places]
    assert told == [("one", "b", "/b"), ("all", "ab", "/c")]


@table("keys")
def test_a_wrong_key_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        asked(**keys)


def test_capabilities_of_the_file_are_the_containers(plan: Planner) -> None:
    run = plan(
        RUN.replace("{memory:", "{cap_add: [IPC_LOCK], memory:"), host=replace(HOST, scheduled=True)
    )
    for kind in ("jobset", "trainjob"):
        found = made(run, **ASKED | {"kind": kind})["spec"]
        found = found if kind == "jobset" else found["runtimePatches"][0]["trainingRuntimeSpec"]
        found = found if kind == "jobset" else found["template"]["spec"]
        context = _pod(found)["containers"][0]["securityContext"]
        assert context["capabilities"] == {"add": ["IPC_LOCK"]}
