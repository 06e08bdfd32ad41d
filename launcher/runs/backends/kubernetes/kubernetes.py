"""The kubernetes backend: creates runs in a cluster, and finds them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.runs.backends import host
from launcher.runs.backends.kubernetes.kubernetes_request import ObjectRequest, request, show
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.clusters import Exclude, Kubernetes

if TYPE_CHECKING:
    from launcher.runs.plan.job import Job
    from launcher.runs.runfile.config import RunConfig


@dataclass(frozen=True)
class KubernetesBackend(host.SchedulerBackend):
    """Creates runs in the cluster that `kubectl` is set up for, or that the run file names."""

    asked: Kubernetes = field(default_factory=Kubernetes)
    name = "kubernetes"
    contained = True
    shares_files = False

    def configured(self, config: RunConfig) -> KubernetesBackend:
        """The backend as a run file asks for it."""
        return KubernetesBackend(config.kubernetes)

    def request(self, plan: Plan) -> ObjectRequest:
        return request(plan, self._excluding, os.environ)

    @cached_property
    def _excluding(self) -> Kubernetes:
        """The keys, with the names of the nodes that `exclude: auto` leaves out."""
        if not isinstance(self.asked.exclude, Exclude):
            return self.asked
        names = host.left_out(self.asked.exclude)
        return self.asked.model_copy(update={"exclude": names or None})

    def show(self, plan: Plan, *, full: bool = False) -> str:
        return show(plan, self.request(plan), full=full)

    def identity(self, image: str) -> Mapping[str, object]:
        return {"name": self.asked.image or image, "id": "as the cluster pulls it"}

    def rootless(self) -> bool:
        return False

    def start(self, plan: Plan, *, attach: bool) -> Job:
        from launcher.runs.backends.kubernetes import kubernetes_job

        if plan.tie:
            raise UsageError("--tie: a cluster's job outlives its launcher")
        return kubernetes_job.submit(plan, self.request(plan))

    def jobs(self) -> list[Job]:
        from launcher.runs.backends.kubernetes import kubernetes_job

        return [*kubernetes_job.jobs()]

    def shell(self, plan: Plan) -> list[str]:
        raise UsageError("a shell in a cluster is kubectl's own", "kubectl run -it --rm …")

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        from launcher.runs.backends.kubernetes.kubernetes_job import KubernetesJob

        assert isinstance(job, KubernetesJob)
        return job.terminal(argv, terminal=terminal)


def backend() -> KubernetesBackend:
    """The backend of the cluster that kubectl is set up for."""
    return KubernetesBackend()
