"""A run as the containers of a compose project: start, output, end, stop, remove."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from docker.api import APIClient
from docker.errors import DockerException, NotFound

from launcher import files
from launcher.backends.compose import UP, request
from launcher.backends.docker_job import (
    FAILURES,
    PROJECT,
    DockerJob,
    answering,
    ended_as,
    remove_container,
    start_error,
    with_memlock_if_allowed,
    words_of,
)
from launcher.backends.group import (
    POLL_SECONDS,
    Group,
    NodeState,
    node_name,
    seconds_since_1970,
)
from launcher.backends.host import tell
from launcher.engine.compose import compose
from launcher.engine.connect import cli_environment
from launcher.names import LABEL
from launcher.plan.plan import Plan
from launcher.records import record

if TYPE_CHECKING:
    from docker import DockerClient

FILE, LOG = "compose.yaml", "compose.log"
LAST_LINES = 200


@dataclass
class ComposeJob(Group):
    """A project that a launcher started, this one or another.

    `up` is the command that starts what has to wait for the first node, while it does.
    """

    nodes: tuple[DockerJob, ...]
    api: APIClient = field(kw_only=True)
    project: str = field(kw_only=True)
    up: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    _known: dict[int, NodeState] = field(default_factory=dict, repr=False)
    _late: str = field(default="", repr=False)

    backend = "compose"

    def look(self) -> list[NodeState]:
        """The states of all nodes; those that wait for one that isn't ready in time never start."""
        states = [self._look(rank, node) for rank, node in enumerate(self.nodes)]
        return [
            state if state.started or state.refused else replace(state, refused=self._late)
            for state in states
        ]

    def _look(self, rank: int, node: DockerJob) -> NodeState:
        """The state of a node; of one that has gone, what was known before. Raises Lost."""
        told, before = node.inspected(), self._known.get(rank)
        if told is None and before and (before.ended or not before.started):
            return before
        ended = ended_as(told)
        if told is None:
            state = NodeState(True, ended, time.time())
        elif told["Status"] == "created":
            state = NodeState(False, refused=told.get("Error", ""))
        else:
            at = seconds_since_1970(told["FinishedAt"]) if ended else 0.0
            state = NodeState(True, ended, at, paused=told["Status"] == "paused")
            unhealthy = (told.get("Health") or {}).get("Status") == "unhealthy"
            if rank == 0 and unhealthy and not ended:  # one that has ended is so, too
                self._late = f"{node_name(0)} didn't open its port in time"
        self._known[rank] = state
        return state

    def log(self, rank: int) -> str:
        container = self.nodes[rank].container
        try:
            told: bytes = self.api.logs(container, tail=LAST_LINES, timestamps=True)
        except FAILURES:
            return ""
        return told.decode(errors="replace")

    def remove(self) -> None:
        if self.up:
            self.up.kill()
            self.up.wait()
        remove(self.api, self.project)


def start(client: DockerClient, plan: Plan) -> ComposeJob:
    """The started project of `plan`; without the memlock limit where the engine may not.

    The first node has started by then; the others start by themselves once that one is ready.
    Raises EngineError, and leaves nothing, where it doesn't start.
    """
    return with_memlock_if_allowed(lambda plan: _start(client, plan), plan)


def _start(client: DockerClient, plan: Plan) -> ComposeJob:
    wanted = request(plan)
    folder = record.make(plan.run)
    file, log = folder / FILE, folder / LOG
    files.write(file, wanted.text, 0o600)
    argv = [*compose(client), "--project-name", wanted.name, "--file", str(file), *UP]
    settings = {k: v for k, v in cli_environment(client).items() if not k.startswith("COMPOSE_")}
    try:
        with open(files.open_own(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as out:
            up = subprocess.Popen(
                argv,
                env=settings | wanted.secrets,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # it starts the other nodes even if the launcher has gone
            )
        return _started(client.api, plan, wanted.name, up, log)
    except BaseException:
        remove(client.api, wanted.name)
        raise


def _started(
    api: APIClient, plan: Plan, project: str, up: subprocess.Popen[bytes], log: Path
) -> ComposeJob:
    """The job, as soon as its first node has started. Raises EngineError where it doesn't."""
    try:
        while True:
            over = up.poll() is not None  # asked first: it may be done before it is looked at
            job = next((one for one in jobs(api) if one.project == project), None)
            if job and len(job.nodes) == plan.nodes and job.look()[0].started:
                job.up = up
                return job
            if over:
                break
            time.sleep(POLL_SECONDS)
    except BaseException:
        up.kill()
        up.wait()
        raise
    raise start_error(DockerException(_said(log)), plan)


def _said(log: Path) -> str:
    """Why compose failed: the last line that isn't of its progress."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.strip() for line in lines if not line.startswith(" ")]
    return next(filter(None, reversed(told)), "no reason given")


def jobs(api: APIClient) -> list[ComposeJob]:
    """The projects that a launcher started, running or ended, newest first."""
    with answering():
        found = api.containers(all=True, filters={"label": [f"{LABEL}run", PROJECT]})
    projects: dict[str, list[dict[str, Any]]] = {}
    for one in sorted(found, key=lambda one: int(one["Created"]), reverse=True):
        projects.setdefault(one["Labels"][PROJECT], []).append(one)
    return [_job(api, name, containers) for name, containers in projects.items()]


def _job(api: APIClient, project: str, containers: list[dict[str, Any]]) -> ComposeJob:
    node = f"{LABEL}node"
    ordered = sorted(containers, key=lambda one: int(one["Labels"].get(node, 0)))
    nodes = tuple(DockerJob(api, one["Id"], one["Labels"]) for one in ordered)
    return ComposeJob(nodes, nodes[0].labels, api=api, project=project)


def remove(api: APIClient, project: str) -> None:
    """Remove the containers and networks of a project, running or not."""
    filters = {"label": f"{PROJECT}={project}"}
    try:
        for container in api.containers(all=True, filters=filters):
            remove_container(api, container["Id"])
        for network in api.networks(filters=filters):
            with suppress(NotFound):
                api.remove_network(network["Id"])
    except FAILURES as error:
        tell(
            f"something of the run is still there: {words_of(error)}; "
            f"docker compose --project-name {project} down"
        )
