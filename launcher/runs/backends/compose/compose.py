"""The compose backend: runs all nodes of a plan on one engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.runs.backends.compose.compose_request import ComposeRequest, request, show
from launcher.runs.backends.docker.docker import DockerBackend
from launcher.runs.plan.plan import Plan

if TYPE_CHECKING:
    from launcher.runs.plan.job import Job


@dataclass(frozen=True)
class ComposeBackend(DockerBackend):
    """Runs all nodes of a plan on one engine."""

    name = "compose"
    every_node = True

    def request(self, plan: Plan) -> ComposeRequest:  # type: ignore[override]
        return request(plan)

    def show(self, plan: Plan, *, full: bool = False) -> str:
        return show(plan)

    def start(self, plan: Plan, *, attach: bool) -> Job:
        from launcher.runs.backends.compose import compose_job

        if plan.payload_mount and not self.shares_files:
            raise UsageError(
                "compose can't give the launcher's payload to an engine on another machine",
                "Take --backend docker for one node, or run the launcher on that machine.",
            )
        return compose_job.start(self._client, plan)

    def jobs(self) -> list[Job]:
        from launcher.runs.backends.compose import compose_job

        return [*compose_job.jobs(self.api)]


def backend() -> ComposeBackend:
    """The backend with the engine that the environment points to."""
    return ComposeBackend()
