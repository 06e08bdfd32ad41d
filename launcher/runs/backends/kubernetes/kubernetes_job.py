"""A run in a cluster: created, found by its label, followed, asked and ended by kubectl."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from launcher.base import files, owned
from launcher.base.errors import EngineError
from launcher.base.names import LABEL
from launcher.base.settings import settings
from launcher.runs.backends import group, host
from launcher.runs.backends.group import POLL_SECONDS, Group, NodeState, unpacked
from launcher.runs.backends.kubernetes.kubernetes_answers import listing
from launcher.runs.backends.kubernetes.kubernetes_request import (
    NODE,
    RUN,
    Dict,
    ObjectRequest,
    config_map,
    place,
)
from launcher.runs.payload import diagnose
from launcher.runs.plan.job import KILLED, ConnectionLost, EndCause, ExitStatus, Job, OutputPiece
from launcher.runs.plan.plan import Plan
from launcher.runs.records import record

PLACE = "kubernetes.json"
KINDS = {"JobSet": "jobsets.jobset.x-k8s.io", "TrainJob": "trainjobs.trainer.kubeflow.org"}
INDEX = "batch.kubernetes.io/job-completion-index"
DONE = ("Completed", "Complete")
"""The condition of a JobSet and of a TrainJob that did what they should; else it is Failed."""

END_SECONDS = 15.0
"""How long after the end of a log a pod's own end may still be reported."""

REMOVAL_SECONDS = 60
TAIL = 500
CHUNK = 1 << 16


@dataclass(frozen=True)
class Cluster:
    """kubectl, with its words for a cluster and a namespace."""

    place: tuple[str, ...]

    def argv(self, *argv: str) -> list[str]:
        return ["kubectl", *self.place, *argv]

    def ask(self, *argv: str, given: str = "", seconds: float = REMOVAL_SECONDS + 30) -> str:
        """What kubectl prints. Raises EngineError where it isn't there or is refused."""
        remedy = "Install kubectl (Debian's kubernetes-client), and set it up for the cluster."
        return host.ask(self.argv(*argv), remedy, given=given, timeout=seconds)

    def listed(self, *kinds: str, run: str = "") -> list[Dict]:
        """The objects of these kinds that belong to `run`, or to any. Raises EngineError."""
        wanted = f"--selector={RUN}" + (f"={run}" if run else "")
        words = ("get", ",".join(kinds), wanted, "--output=json")
        return listing(self.ask(*words, seconds=settings().answer_within), RUN)


@dataclass
class ClusterQuery(host.SchedulerQuery):
    """What the cluster says of a run, all its nodes."""

    cluster: Cluster
    kind: str
    run: str
    owner: Dict | None = None
    pods: dict[int, Dict] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)

    def ask(self) -> None:
        found = self.cluster.listed(KINDS[self.kind], "pods", run=self.run)
        self.owner = next((one for one in found if one["kind"] == self.kind), None)
        pods = [one for one in found if one["kind"] == "Pod"]
        pods.sort(key=lambda one: str(one["metadata"].get("creationTimestamp")))
        named = ((one["metadata"].get("annotations", {}).get(INDEX), one) for one in pods)
        self.pods = {int(index): one for index, one in named if index and index.isdecimal()}

    def delete(self, kind: str, name: str, *words: str) -> None:
        """Delete an object; warn where it stays."""
        try:
            self.cluster.ask("delete", kind, name, "--ignore-not-found", *words)
        except EngineError as error:
            host.tell(f"{name} is still there: {error.problem}")
        self.forget()

    def _is(self, *types: str) -> bool:
        """Whether the owner has one of these conditions."""
        conditions = (self.owner or {}).get("status", {}).get("conditions", [])
        return any(one["type"] in types and one["status"] == "True" for one in conditions)

    @property
    def over(self) -> bool:
        """Whether the cluster does no more for the run."""
        return self.owner is None or self._is(*DONE, "Failed")

    @property
    def restarts(self) -> bool:
        """Whether the cluster starts a run that failed again."""
        policy = (self.owner or {}).get("spec", {}).get("failurePolicy", {})
        return bool(policy.get("maxRestarts"))

    def state(self, rank: int) -> NodeState:
        """Of a node, by its pod; one whose pod has gone has ended when the run has."""
        pod = self.pods.get(rank, {})
        found, running = _ended(pod), "running" in _container(pod).get("state", {})
        if found or running:
            self.begun.add(rank)
        if found and not (found.failed and self.restarts and not self.over):
            return found
        if self.over and not running:
            return NodeState.ended_by_others(0 if self._is(*DONE) else KILLED)
        return NodeState(rank in self.begun)

    def tell_waiting(self) -> None:
        """Say why nodes haven't begun, once for each reason."""
        reasons = [_waits(pod) for _, pod in sorted(self.pods.items())]
        if (self.owner or {}).get("spec", {}).get("suspend"):
            reasons.append("suspended by a queue")
        for why in filter(None, reasons):
            self.tell(f"the run waits: {why}")


def _container(pod: Dict) -> Dict:
    """The status of the pod's container of ours."""
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return next((one for one in statuses if one["name"] == NODE), {})


def _waits(pod: Dict) -> str:
    """Why a pod hasn't begun; "" where no reason is given."""
    waiting = _container(pod).get("state", {}).get("waiting", {})
    conditions = pod.get("status", {}).get("conditions", [])
    unscheduled = [one for one in conditions if one["type"] == "PodScheduled"]
    told = (one for one in (waiting, *unscheduled) if one.get("message"))
    return next((f"{one.get('reason')}: {one['message']}" for one in told), "")


def _ended(pod: Dict) -> NodeState | None:
    """How a pod's program ended, at first: a runtime may have it start again in its place."""
    status, container = pod.get("status", {}), _container(pod)
    for which in ("lastState", "state"):
        if told := container.get(which, {}).get("terminated"):
            cause = EndCause.MEMORY if told.get("reason") == "OOMKilled" else EndCause.ITSELF
            at = told.get("finishedAt")
            ended_at = group.seconds_since_1970(at) if at else time.time()
            return NodeState(True, ExitStatus(int(told["exitCode"]), cause), ended_at)
    if status.get("phase") == "Failed":  # evicted, or its node has gone
        why = ": ".join(filter(None, (status.get("reason"), status.get("message"))))
        return NodeState(True, ExitStatus(KILLED, why=why), time.time())
    return None


@dataclass
class PodJob(host.PolledJob):
    """A node of a run: its pod, or those that came after one another."""

    seen: ClusterQuery
    name: str
    rank: int
    labels: Mapping[str, str]

    backend = "kubernetes"

    @property
    def run(self) -> str:
        return self.seen.run

    @property
    def handle(self) -> str:
        """The pod's name; before there is one, what its host will be called."""
        pod = self.seen.fresh().pods.get(self.rank)
        return str(pod["metadata"]["name"]) if pod else f"{self.name}-{NODE}-0-{self.rank}"

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        read = set[str]()
        while True:
            state = self.seen.fresh().state(self.rank)
            pod = self.seen.pods.get(self.rank, {})
            uid = str(pod.get("metadata", {}).get("uid"))
            begun = _ended(pod) or "running" in _container(pod).get("state", {})
            if begun and uid not in read:
                read.add(uid)
                why = yield from self._log(self.handle, follow)
                self._wait_for_end(uid, why if why or not follow else "its log has ended")
            elif not follow or state.ended or self.seen.over:
                return
            else:
                self.seen.tell_waiting()
                time.sleep(POLL_SECONDS)

    def _log(self, pod: str, follow: bool) -> Generator[OutputPiece, None, str]:
        """What a pod has written; returns why there is no more, where kubectl failed."""
        words = [pod, f"--container={NODE}", *(["--follow"] if follow else [])]
        with subprocess.Popen(
            self.seen.cluster.argv("logs", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
        ) as process:
            assert process.stdout
            assert process.stderr
            try:
                while data := process.stdout.read(CHUNK):
                    yield OutputPiece(False, data)
                told = process.stderr.read().decode(errors="replace").strip()
            finally:
                process.terminate()
        told = told or f"kubectl logs ended with {process.returncode}"
        return told if process.returncode else ""

    def _wait_for_end(self, uid: str, why: str) -> None:
        """Check that a pod has ended, for `why`. ConnectionLost: it goes on."""
        until = time.monotonic() + END_SECONDS
        while why:
            pod = self.seen.fresh(POLL_SECONDS).pods.get(self.rank)
            if not pod or pod["metadata"]["uid"] != uid or _ended(pod):
                return
            if time.monotonic() >= until:
                raise ConnectionLost(f"{self.handle}: {why}, and it goes on")
            time.sleep(POLL_SECONDS)

    def ended(self) -> ExitStatus | None:
        return self.seen.fresh().state(self.rank).ended

    def state(self) -> str:
        return "running" if self.seen.fresh().state(self.rank).started else "pending"

    def ask(self) -> None:
        """Ask the program, which is the container's first process; its exit code is kept so.

        Where nobody may ask it, its pod is deleted, with the time to save.
        """
        if self.inside("sh", "-c", 'kill -TERM "$0"', "1") is None:
            self.seen.delete("pod", self.handle, "--wait=false")

    def kill(self) -> None:
        self.seen.delete("pod", self.handle, "--wait=false", "--grace-period=1")

    def remove(self) -> None:
        self.kill()

    def inside(self, *argv: str) -> bytes | None:
        """What a command in the container writes; None where it fails, or can't be run there."""
        words = self.seen.cluster.argv("exec", self.handle, f"--container={NODE}", "--", *argv)
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(words, capture_output=True, timeout=60)
            return done.stdout if done.returncode == 0 else None
        return None

    def files(self, path: str) -> dict[str, bytes]:
        return unpacked(self.inside("tar", "-cf", "-", "--", path) or b"")

    def diagnose(self) -> dict[str, bytes]:
        return unpacked(self.inside(*diagnose(self.labels)) or b"")


@dataclass
class KubernetesJob(Group):
    """A run's pods as one job, and the object that owns them."""

    seen: ClusterQuery = field(kw_only=True)
    name: str = field(kw_only=True)
    logs: dict[str, str] = field(default_factory=dict, kw_only=True, repr=False)

    backend = "kubernetes"

    def look(self) -> list[NodeState]:
        self.seen.fresh()
        return [self.seen.state(rank) for rank in range(len(self.nodes))]

    def log(self, rank: int) -> str:
        pod = self.nodes[rank].handle
        words = (f"--container={NODE}", "--timestamps", f"--tail={TAIL}")
        if rank in self.seen.pods and pod not in self.logs:
            with suppress(EngineError):
                self.logs[pod] = self.seen.cluster.ask("logs", pod, *words)
        return self.logs.get(pod, "")

    def ended(self) -> ExitStatus | None:
        if self.seen.fresh().owner is None:
            return ExitStatus(KILLED, EndCause.REMOVED)
        ended = super().ended()
        return replace(ended, hosts=self._hosts()) if ended else None

    def _hosts(self) -> tuple[str, ...]:
        """The machines of its pods, "" for one that was never found on any."""
        pods = (self.seen.pods.get(rank, {}) for rank in range(len(self.nodes)))
        return tuple(str(pod.get("spec", {}).get("nodeName", "")) for pod in pods)

    def state(self) -> str:
        return "running" if any(state.started for state in self.look()) else "pending"

    def _end_survivors(self) -> None:
        super()._end_survivors()
        self.seen.tell_waiting()

    def stop(self, grace: int) -> None:
        super().stop(grace)
        if self.ended() is None:  # the cluster starts it again
            self.kill()

    def kill(self) -> None:
        """End all nodes; what the cluster would start again is taken from it first."""
        if self.seen.fresh().restarts and not self.seen.over:
            self.seen.delete(KINDS[self.seen.kind], self.name, "--wait=false")
        super().kill()

    def remove(self) -> None:
        if any(state.started and not state.ended for state in self.look()):
            super().kill()
        words = ("--cascade=foreground", f"--timeout={REMOVAL_SECONDS}s")
        self.seen.delete(KINDS[self.seen.kind], self.name, *words)
        folder = record.folder(self.run)
        owned.remove_file(folder / PLACE, folder, missing_ok=True)

    def terminal(self, argv: list[str], *, terminal: bool) -> list[str]:
        """The command that runs `argv` in the first node for a person."""
        attached = ["--stdin", *(["--tty"] if terminal else [])]
        where = [self.handle, f"--container={NODE}", "--", *argv]
        return self.seen.cluster.argv("exec", *attached, *where)


def submit(plan: Plan, asked: ObjectRequest) -> KubernetesJob:
    """The job, created. Raises EngineError, and leaves nothing, where the cluster refuses it."""
    cluster, kind = Cluster(_settled(asked.place)), str(asked.manifest["kind"])
    folder = record.make(plan.run)
    kept = {"kind": kind, "place": cluster.place}
    files.write(folder / PLACE, json.dumps(kept), 0o600)
    try:
        words = ("create", "--filename=-", "--output=json")
        owner = _made(cluster.ask(*words, given=json.dumps(asked.manifest)))
    except EngineError:
        owned.remove_file(folder / PLACE, folder, missing_ok=True)
        raise
    job = _job(cluster, kind, asked.manifest)
    if asked.config_map:
        try:
            manager = f"--field-manager=launcher-{plan.run}"  # each adds itself to the owners
            sent = json.dumps(config_map(plan, owner))
            cluster.ask("apply", "--server-side", manager, "--filename=-", given=sent)
        except EngineError as error:
            job.remove()
            raise EngineError(
                f"the launcher's payload can't be sent: {error.problem}",
                "The run needs the right to create and patch ConfigMaps in its namespace.",
            ) from error
    return job


def _made(text: str) -> Dict:
    """The object that was created, as the cluster has it. Raises EngineError."""
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict) and found.get("metadata", {}).get("uid"):
            return found
    raise EngineError("kubectl's answer doesn't name what it created")


def _settled(words: tuple[str, ...]) -> tuple[str, ...]:
    """The words with the context and namespace that kubectl has by default, which may change."""
    told = dict(word.removeprefix("--").split("=", 1) for word in words)
    cluster = Cluster(place(told.get("context"), None))
    # Within a pod there is no configuration, and one cluster.
    with suppress(EngineError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        view = json.loads(cluster.ask("config", "view", "--minify", "--output=json"))
        (entry,) = view["contexts"]
        told = {"namespace": entry["context"].get("namespace"), "context": entry["name"]} | told
    return place(told.get("context"), told.get("namespace") or None)


def _job(cluster: Cluster, kind: str, manifest: Mapping[str, Any]) -> KubernetesJob:
    told = manifest["metadata"].get("annotations") or {}
    labels = {key: str(value) for key, value in told.items() if key.startswith(LABEL)}
    run, name = manifest["metadata"]["labels"][RUN], str(manifest["metadata"]["name"])
    seen, count = ClusterQuery(cluster, kind, run), int(labels.get(f"{LABEL}nodes", "1"))
    nodes: tuple[Job, ...] = tuple(PodJob(seen, name, rank, labels) for rank in range(count))
    return KubernetesJob(nodes, labels, seen=seen, name=name)


def jobs() -> list[KubernetesJob]:
    """The runs in the clusters and namespaces where this user has some, by their label."""
    places, found = set[tuple[str, tuple[str, ...]]](), list[KubernetesJob]()
    for path in settings().runs.glob(f"*/{PLACE}"):
        with suppress(OSError, ValueError, KeyError):  # another version's
            kept = json.loads(Path(path).read_text(encoding="utf-8"))
            if kept["kind"] in KINDS:
                places.add((kept["kind"], tuple(map(str, kept["place"]))))
    for kind, words in sorted(places):
        cluster = Cluster(words)
        found += [_job(cluster, kind, one) for one in cluster.listed(KINDS[kind])]
    return found
