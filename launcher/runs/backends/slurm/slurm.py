"""The slurm backend: submits plans to a cluster, and finds their jobs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import EngineError, UsageError
from launcher.base.settings import settings
from launcher.runs.backends import host
from launcher.runs.backends.slurm import slurm_queue
from launcher.runs.backends.slurm.slurm_request import (
    SIZES,
    NodeSize,
    SlurmRequest,
    _container_here,
    array,
    node_sizes,
    request,
)
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.clusters import Exclude, Slurm

if TYPE_CHECKING:
    from launcher.runs.plan.job import Job
    from launcher.runs.runfile.config import RunConfig


@dataclass(frozen=True)
class SlurmBackend(host.SchedulerBackend):
    """Submits to the cluster whose programs are on PATH."""

    asked: Slurm = field(default_factory=Slurm)
    name = "slurm"
    shares_files = True

    @property
    def contained(self) -> bool:
        """Whether a run has files and packages of its own, or the nodes' own."""
        return self.asked.container != "none"

    @property
    def tasks(self) -> list[int]:
        """The numbers of an array's tasks, each to be a run; [] of what is one run."""
        return self.asked.tasks

    def configured(self, config: RunConfig) -> SlurmBackend:
        """The backend as a run file asks for it.

        Where it doesn't say in what the image runs, in what is here. Raises UsageError where
        neither pyxis nor Apptainer is.
        """
        asked = config.slurm
        if "container" not in asked.model_fields_set:
            asked = asked.model_copy(update={"container": _container_here()})
            host.tell(f"slurm.container isn't set: the image runs by {asked.container}, found here")
        return SlurmBackend(asked)

    def _sizes(self) -> list[NodeSize]:
        """Of the nodes, as sinfo says them; [] where it isn't here, or doesn't answer."""
        try:
            return node_sizes(slurm_queue.ask(*SIZES), self.asked.partition)
        except EngineError:
            return []

    def request(self, plan: Plan) -> SlurmRequest:
        asked = self._excluding.model_copy(update={"array": None} if self.tasks else {})
        return request(plan, asked, settings().runs / plan.run, self._sizes())

    @cached_property
    def _excluding(self) -> Slurm:
        """The keys, with the names of the nodes that `exclude: auto` leaves out."""
        if not isinstance(self.asked.exclude, Exclude):
            return self.asked
        names = ",".join(host.left_out(self.asked.exclude))
        return self.asked.model_copy(update={"exclude": names or None})

    def show(self, plan: Plan, *, full: bool = False) -> str:
        """The script, which `sbatch` takes where its folder has been made."""
        asked = self.request(plan)
        if self.tasks:
            script = array({self.tasks[0]: plan}, self._excluding, settings().runs, self._sizes())
            told = "# of the others as well, which have scripts, folders and seeds of their own\n"
            return f"{script}{told}\n# {asked.path}\n{asked.script}"
        return f"# mkdir -p {shlex.quote(str(Path(asked.path).parent))}; sbatch\n{asked.script}"

    def identity(self, image: str) -> Mapping[str, object]:
        return {"name": self.asked.image or image, "id": f"on the nodes, by {self.asked.container}"}

    def rootless(self) -> bool:
        return self.asked.container in ("podman", "apptainer", "pyxis")

    def _say_limit(self) -> None:
        if not self.asked.time:
            host.tell("slurm.time isn't set: the partition's own time limit applies")

    def start(self, plan: Plan, *, attach: bool) -> Job:
        from launcher.runs.backends.slurm import slurm_job

        if plan.tie:
            raise UsageError("--tie: a Slurm job outlives its launcher", "Set slurm.time instead.")
        self._say_limit()
        asked = self.request(plan)
        return slurm_job.submit({0: plan}, {0: asked}, [asked.path])[0]

    def start_array(self, plans: Mapping[int, Plan]) -> list[Job]:
        """Start the runs that are an array's tasks, by their numbers."""
        from launcher.runs.backends.slurm import slurm_job

        self._say_limit()
        asked = {number: self.request(plan) for number, plan in plans.items()}
        script = array(plans, self._excluding, settings().runs, self._sizes())
        return [*slurm_job.submit(plans, asked, [], script)]

    def jobs(self) -> list[Job]:
        from launcher.runs.backends.slurm import slurm_job

        return [*slurm_job.jobs()]

    def shell(self, plan: Plan) -> list[str]:
        raise UsageError("a shell on a cluster is Slurm's own", "srun --pty bash")

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        known = ["--noheader", "--states=running", f"--jobs={job.handle}", "--format=%A"]
        found = slurm_queue.ask("squeue", *known).split() or [job.handle]  # of a chain the one
        on_a_node = ["srun", f"--jobid={found[0]}", "--overlap", "--nodes=1", "--ntasks=1"]
        return [*on_a_node, *(["--pty"] if terminal else []), *argv]


def backend() -> SlurmBackend:
    """The backend of the cluster that this machine submits to."""
    return SlurmBackend()
