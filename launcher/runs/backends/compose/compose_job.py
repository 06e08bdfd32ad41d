"""A run as the containers of a compose project: start, output, end, stop, remove."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import files
from launcher.base.names import LABEL
from launcher.images.engine.compose_plugin import compose
from launcher.images.engine.connect import cli_environment
from launcher.runs.backends import container
from launcher.runs.backends.compose.compose_request import UP, request
from launcher.runs.backends.container import PROJECT, DockerJob
from launcher.runs.backends.group import (
    POLL_SECONDS,
    Group,
    NodeState,
    node_name,
    seconds_since_1970,
)
from launcher.runs.backends.host import tell
from launcher.runs.plan.plan import Plan
from launcher.runs.records import record

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.api import APIClient

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
        """A node's state; of one that has gone, the last known. Raises ConnectionLost."""
        told, before = node.inspected(), self._known.get(rank)
        if told is None and before and (before.ended or not before.started):
            return before
        ended = container.ended_as(told)
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
        try:
            told: bytes = self.api.logs(self.nodes[rank].handle, tail=LAST_LINES, timestamps=True)
        except container.failures():
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
    return container.with_memlock_if_allowed(lambda plan: _start(client, plan), plan)


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
    raise container.start_error(RuntimeError(_said(log)), plan)


def _said(log: Path) -> str:
    """Why compose failed: the last line that isn't of its progress."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line.strip() for line in lines if not line.startswith(" ")]
    return next(filter(None, reversed(told)), "no reason given")


def jobs(api: APIClient) -> list[ComposeJob]:
    """The projects that a launcher started, running or ended, newest first."""
    projects, found = dict[str, list[dict[str, Any]]](), list[ComposeJob]()
    for one in container.listed(api):
        if project := one["Labels"].get(PROJECT):
            projects.setdefault(project, []).append(one)
    for project, told in projects.items():
        told.sort(key=lambda one: int(one["Labels"].get(f"{LABEL}node", 0)))
        nodes = tuple(DockerJob(api, one["Id"], one["Labels"]) for one in told)
        found.append(ComposeJob(nodes, nodes[0].labels, api=api, project=project))
    return found


def remove(api: APIClient, project: str) -> None:
    """Remove the containers and networks of a project, running or not."""
    filters = {"label": f"{PROJECT}={project}"}
    try:
        for one in api.containers(all=True, filters=filters):
            container.remove_container(api, one["Id"])
        for network in api.networks(filters=filters):
            with suppress(container.missing()):
                api.remove_network(network["Id"])
    except container.failures() as error:
        tell(
            f"something of the run is still there: {container.words_of(error)}; "
            f"docker compose --project-name {project} down"
        )
