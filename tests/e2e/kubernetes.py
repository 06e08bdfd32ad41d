"""A stand-in for a cluster: an API server that keeps what it is given, for a real kubectl.

Pods are processes of this machine. It has the parts of the JobSet and the Trainer controllers that
matter to a run: pods by index, the rendezvous, failure, restarts. It has no SPDY, so that `kubectl
exec` alone is a stand-in's own.
"""

from __future__ import annotations

import copy
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from launcher.images.engine.private import packages

NAMESPACE = "team-a"
GROUPS = {
    "jobset.x-k8s.io/v1alpha2": ("jobsets", "JobSet"),
    "trainer.kubeflow.org/v1alpha1": ("trainjobs", "TrainJob"),
}
KUBECTL = """\
#!{python}
import json, os, sys, urllib.request
if "exec" not in sys.argv:
    os.execv({kubectl!r}, ["kubectl", *sys.argv[1:]])
at = sys.argv.index("--")
pod = next(word for word in sys.argv[sys.argv.index("exec") + 1 : at] if word[0] != "-")
asked = json.dumps({{"pod": pod, "argv": sys.argv[at + 1 :]}}).encode()
with urllib.request.urlopen("{url}/stand-in/exec", asked) as answer:
    told = json.load(answer)
os.write(1, bytes.fromhex(told["stdout"]))
sys.exit(told["code"])
"""
CONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "current-context": "here",
    "contexts": [
        {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
    ],
    "users": [{"name": "u", "user": {}}],
}
Object = dict[str, Any]


def now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass
class Pod:
    """A pod: what the API says of it, and its process."""

    object: Object
    process: subprocess.Popen[bytes] | None = None
    log: list[tuple[str, bytes]] = field(default_factory=list)
    whole: bool = False

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    def status(self, state: Object, phase: str) -> None:
        container = {"name": "node", "restartCount": 0, "state": state}
        self.object["status"] = {"phase": phase, "containerStatuses": [container]}

    def end(self, grace: float) -> None:
        """As a kubelet does: asked, and killed after a while."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(grace)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Cluster:
    """The objects and the pods; `full` keeps pods waiting, `closed` lets nobody into them."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, Object] = {}
        self.pods: dict[str, Pod] = {}
        self.config_maps: dict[str, Object] = {}
        self.full = self.closed = False

    def create(self, given: Object) -> Object:
        made = copy.deepcopy(given)
        made["metadata"] |= {"uid": os.urandom(8).hex(), "creationTimestamp": now()}
        made["metadata"]["namespace"] = NAMESPACE
        with self.lock:
            self.objects[made["metadata"]["name"]] = made
        threading.Thread(target=self._carry_out, args=(made,), daemon=True).start()
        return made

    def apply(self, name: str, given: Object) -> Object:
        """A ConfigMap by server-side apply, whose owners are those of all who applied it."""
        with self.lock:
            kept = self.config_maps.setdefault(name, copy.deepcopy(given))
            assert kept["binaryData"] == given["binaryData"]  # it is immutable
            owners = [*kept["metadata"]["ownerReferences"], *given["metadata"]["ownerReferences"]]
            kept["metadata"]["ownerReferences"] = [*{one["uid"]: one for one in owners}.values()]
            return kept

    def _collect(self, uid: str) -> None:
        """What the garbage collector does once an owner has gone."""
        with self.lock:
            for name, one in [*self.config_maps.items()]:
                left = [each for each in one["metadata"]["ownerReferences"] if each["uid"] != uid]
                one["metadata"]["ownerReferences"] = left
                if not left:
                    del self.config_maps[name]

    def _carry_out(self, made: Object) -> None:
        restarts = made["spec"].get("failurePolicy", {}).get("maxRestarts", 0)
        for attempt in range(restarts + 1):
            failed = self._attempt(made, attempt)
            with self.lock:
                last = not failed or attempt == restarts
                if last or not self.going_on(made):
                    break
            self.end_pods(made, 1)
        word = "Failed" if failed else "Completed"
        made["status"] = {"conditions": [{"type": word, "status": "True"}]}

    def _attempt(self, made: Object, attempt: int) -> bool:
        """Whether an attempt failed: the first pod that does ends the others."""
        pods = self._started(made, attempt)
        while any(not pod.whole for pod in pods):
            time.sleep(0.05)
            codes = [pod.process.poll() for pod in pods if pod.process]
            if any(codes):
                for pod in pods:
                    if pod.process and pod.process.poll() is None:
                        self._delete_later(pod, 600)
                return True
            if not self.going_on(made):
                return True
        return False

    def _delete_later(self, pod: Pod, grace: float) -> None:
        threading.Thread(target=self.delete_pod, args=(pod.name, grace), daemon=True).start()

    def delete_pod(self, name: str, grace: float) -> None:
        if pod := self.pods.get(name):
            pod.end(grace)
            with self.lock:
                self.pods.pop(name, None)

    def end_pods(self, made: Object, grace: float) -> None:
        for pod in [*self.pods.values()]:
            if pod.object["metadata"]["owner"] == made["metadata"]["name"]:
                self.delete_pod(pod.name, grace)

    def delete(self, name: str) -> None:
        """In the foreground, as it is called: the object goes after its pods."""
        made = self.objects[name]
        made["metadata"]["deletionTimestamp"] = now()
        self.end_pods(made, 1)
        with self.lock:
            self.objects.pop(name, None)
        self._collect(made["metadata"]["uid"])

    def going_on(self, made: Object) -> bool:
        return "deletionTimestamp" not in made["metadata"]

    def _started(self, made: Object, attempt: int) -> list[Pod]:
        name, spec = made["metadata"]["name"], made["spec"]
        wanted = re.findall(r'"configMap": \{"name": "([^"]+)"', json.dumps(spec))
        while self.going_on(made) and not {*wanted} <= {*self.config_maps}:
            time.sleep(0.02)  # a kubelet asks again
        with socket.create_server(("127.0.0.1", 0)) as held:
            meeting = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": held.getsockname()[1]}
        if made["kind"] == "JobSet":
            job = spec["replicatedJobs"][0]["template"]["spec"]
            template, count = job["template"], job["completions"]
            container = template["spec"]["containers"][0]
        else:
            runtime = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
            template = runtime["replicatedJobs"][0]["template"]["spec"]["template"]
            container = template["spec"]["containers"][0] | spec["trainer"]
            count = spec["trainer"]["numNodes"]
            meeting["PET_NNODES"] = count
        pods = []
        for index in range(count):
            metadata = {
                "name": f"{name}-node-0-{index}-{os.urandom(2).hex()}",
                "namespace": NAMESPACE,
                "uid": os.urandom(8).hex(),
                "creationTimestamp": now(),
                "labels": template["metadata"]["labels"],
                "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
                "owner": name,
            }
            pod = Pod({"metadata": metadata, "spec": {"containers": [{"name": "node"}]}})
            why = {"reason": "Unschedulable", "message": "0/3 nodes are available"}
            told = {"type": "PodScheduled", "status": "False", **why}
            pod.object["status"] = {"phase": "Pending", "conditions": [told]}
            with self.lock:
                self.pods[pod.name] = pod
            pods.append(pod)
        while self.full and self.going_on(made):
            time.sleep(0.05)
        for index, pod in enumerate(pods):
            fields = {"PET_NODE_RANK": index, "RESTART": attempt} | meeting
            self._start(pod, container, template["spec"]["volumes"], fields)
        return pods

    def _start(self, pod: Pod, container: Object, volumes: list[Object], more: Object) -> None:
        """Start a pod's process: paths below its mounts are this machine's."""
        env = {one["name"]: one.get("value", "").replace("$$", "$") for one in container["env"]}
        env |= {name: str(value) for name, value in more.items()}
        named = {one["name"]: one.get("hostPath", {}).get("path") for one in volumes}
        argv = [word.replace("$$", "$") for word in container["args"]]
        for mount in container["volumeMounts"]:
            if root := named[mount["name"]]:
                source, target = f"{root}/{mount.get('subPath', '')}", mount["mountPath"]
                argv = [re.sub(f"^{re.escape(target)}(?=/|$)", source, word) for word in argv]
        pod.process = subprocess.Popen(
            argv,
            env=os.environ | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        pod.status({"running": {"startedAt": now()}}, "Running")
        threading.Thread(target=self._keep, args=(pod,), daemon=True).start()

    def _keep(self, pod: Pod) -> None:
        assert pod.process
        assert pod.process.stdout
        for line in pod.process.stdout:
            pod.log.append((datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ"), line))
        code = pod.process.wait()
        code = 128 - code if code < 0 else code
        ended = {"exitCode": code, "finishedAt": now(), "reason": "Error" if code else "Completed"}
        pod.status({"terminated": ended}, "Failed" if code else "Succeeded")
        pod.whole = True

    def exec(self, name: str, argv: list[str]) -> Object:
        """A command beside the pod's process, which is the first one there."""
        pod = self.pods.get(name)
        if self.closed or pod is None or pod.process is None or pod.process.poll() is not None:
            return {"stdout": "", "code": 1}
        words = [str(pod.process.pid) if word == "1" else word for word in argv]
        if words[-1] == "stall.stall":  # which here sees the other pods' as well
            words.append(str(pod.process.pid))
        done = subprocess.run(words, capture_output=True, timeout=30)
        return {"stdout": done.stdout.hex(), "code": done.returncode}

    def end(self) -> list[str]:
        """End what goes on; what was left, which should be nothing."""
        left = [*self.objects, *self.pods, *self.config_maps]
        for name in [*self.objects]:
            self.delete(name)
        for pod in [*self.pods.values()]:
            pod.end(0)
        return left


class Handler(BaseHTTPRequestHandler):
    """The API of the cluster, as far as kubectl asks for it."""

    cluster: Cluster
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, value: Any, code: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def absent(self, name: str = "") -> None:
        told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}
        self.answer(told | {"message": f'"{name}" not found', "code": 404}, 404)

    def given(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        if found := discovery(url.path):
            return self.answer(found)
        if url.path == "/openapi/v2":  # an empty schema, as kubectl reads it
            self.send_response(200)
            self.send_header("Content-Length", "0")
            return self.end_headers()
        kind, name, part = self.parts()
        if kind == "pods" and part == "log":
            return self.log(name, query)
        if "watch" in query:
            return self.watch(query["fieldSelector"].removeprefix("metadata.name="))
        with self.cluster.lock:
            known = {one.name: one.object for one in self.cluster.pods.values()}
            plurals = dict(GROUPS.values())
            if kind != "pods":
                known = self.cluster.objects
                known = {k: one for k, one in known.items() if one["kind"] == plurals.get(kind)}
            if name:
                found = known.get(name)
                return self.answer(self.full(kind, found)) if found else self.absent(name)
            wanted = query.get("labelSelector", "").partition("=")
            items = [one for one in known.values() if selected(one, wanted[0], wanted[2])]
            if named := query.get("fieldSelector", "").removeprefix("metadata.name="):
                items = [one for one in items if one["metadata"]["name"] == named]
            version = next((v for v, (p, _) in GROUPS.items() if p == kind), "v1")
            listed = {"kind": f"{plurals.get(kind, 'Pod')}List", "apiVersion": version}
            self.answer(listed | {"metadata": {"resourceVersion": "1"}, "items": items})

    def full(self, kind: str, found: Object) -> Object:
        return {"kind": "Pod", "apiVersion": "v1", **found} if kind == "pods" else found

    def parts(self) -> tuple[str, str, str]:
        """The kind, name and part of an object that the address is of."""
        found = re.search(r"/namespaces/[^/]+/([^/]+)/?([^/]*)/?([^/]*)$", urlsplit(self.path).path)
        return (found[1], found[2], found[3]) if found else ("", "", "")

    def log(self, name: str, query: dict[str, str]) -> None:
        pod = self.cluster.pods.get(name)
        if pod is None:
            return self.absent(name)
        self.begin()
        told = max(0, len(pod.log) - int(query["tailLines"])) if "tailLines" in query else 0
        while True:
            last = pod.whole or query.get("follow") != "true"
            for at, line in pod.log[told:]:
                told += 1
                line = f"{at} ".encode() + line if query.get("timestamps") == "true" else line
                self.piece(line)
            if last:
                break
            time.sleep(0.02)
        self.piece(b"")

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def watch(self, name: str) -> None:
        """Tell when an object has gone."""
        self.begin()
        found = self.cluster.objects.get(name)
        while name in self.cluster.objects:
            time.sleep(0.02)
        if found:
            self.piece(json.dumps({"type": "DELETED", "object": found}).encode() + b"\n")
        self.piece(b"")

    def do_POST(self) -> None:
        given = self.given()
        if self.path == "/stand-in/exec":
            return self.answer(self.cluster.exec(given["pod"], given["argv"]))
        query = parse_qs(urlsplit(self.path).query)
        self.answer(given if "dryRun" in query else self.cluster.create(given), 201)

    def do_PATCH(self) -> None:
        _, name, _ = self.parts()
        self.answer(self.cluster.apply(name, self.given()))

    def do_DELETE(self) -> None:
        kind, name, _ = self.parts()
        grace = self.given().get("gracePeriodSeconds", 600)
        if kind == "pods" and name in self.cluster.pods:
            self.cluster._delete_later(self.cluster.pods[name], grace)
        elif name in self.cluster.objects:
            threading.Thread(target=self.cluster.delete, args=(name,), daemon=True).start()
        else:
            return self.absent(name)
        self.answer({"kind": "Status", "apiVersion": "v1", "status": "Success"})


def selected(one: Object, label: str, value: str) -> bool:
    found = one["metadata"].get("labels", {}).get(label) if label else ""
    return found is not None and (not value or found == value)


def discovery(path: str) -> Object | None:
    """What the server says of its own kinds."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = []
        for version in GROUPS:
            told = {"groupVersion": version, "version": version.partition("/")[2]}
            name = version.partition("/")[0]
            groups.append({"name": name, "versions": [told], "preferredVersion": told})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    kinds = {f"/apis/{v}": [pair] for v, pair in GROUPS.items()}
    kinds |= {"/api/v1": [("pods", "Pod"), ("configmaps", "ConfigMap")]}
    if path not in kinds:
        return None
    same = {"singularName": "", "namespaced": True}
    same |= {"verbs": ["create", "delete", "get", "list", "patch", "watch"]}
    told = [{"name": plural, "kind": kind, **same} for plural, kind in kinds[path]]
    version = path.removeprefix("/apis/").removeprefix("/api/")
    return {"kind": "APIResourceList", "groupVersion": version, "resources": told}


@contextmanager
def cluster(cache: Path, folder: Path) -> Iterator[tuple[Cluster, dict[str, str]]]:
    """The stand-in, and the variables with which kubectl is found, and finds it."""
    root = packages.unpack(cache / "kubectl", ("kubernetes-client",))
    found, handler = Cluster(), type("Own", (Handler,), {})
    handler.cluster = found  # type: ignore[attr-defined]
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    clusters = [{"name": "c", "cluster": {"server": url}}]
    (folder / "config").write_text(json.dumps(CONFIG | {"clusters": clusters}))
    (folder / "bin").mkdir()
    kubectl = folder / "bin/kubectl"
    real = str(root / "usr/bin/kubectl")
    kubectl.write_text(KUBECTL.format(python=sys.executable, kubectl=real, url=url))
    kubectl.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    try:
        yield found, {"PATH": path, "KUBECONFIG": str(folder / "config"), "HOME": str(folder)}
    finally:
        found.end()
        server.shutdown()
        server.server_close()
