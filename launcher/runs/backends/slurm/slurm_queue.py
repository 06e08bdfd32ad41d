"""Calls Slurm's programs: submits, lists and cancels jobs, also on sites without accounting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from launcher.base.errors import EngineError
from launcher.base.settings import settings
from launcher.runs.backends import host

SQUEUE = "squeue --me --array --noheader --states=all --format=%i|%F|%T|%r".split()
ROW = re.compile(r"[\w\[\]%,+-]+\|\d+\|[A-Z_]+\|.*")
"""A line of what `SQUEUE` prints: anything else isn't taken for "no such job"."""

NOT_HERE = "Start runs where Slurm is: on a login node."
GOES_ON = frozenset(
    "PENDING CONFIGURING RUNNING SUSPENDED COMPLETING REQUEUED STOPPED RESIZING SIGNALING "
    "STAGE_OUT REQUEUE_HOLD REQUEUE_FED SPECIAL_EXIT".split()
)
"""The states of jobs that may still write: man squeue, JOB STATE CODES."""


def ask(*argv: str, env: Mapping[str, str] | None = None, given: str = "") -> str:
    """What a program of Slurm prints. Raises EngineError where it isn't there or refuses."""
    return host.ask(argv, NOT_HERE, env=env, given=given)


def submit(*argv: str, env: Mapping[str, str] | None = None, given: str = "") -> str:
    """The number of the job that sbatch makes of a script, named or given. Raises EngineError."""
    told = ask("sbatch", "--parsable", *argv, env=env, given=given)
    job = told.strip().partition(";")[0]  # of a federation: ID;CLUSTER
    if not re.fullmatch(r"\d{1,18}", job):
        raise EngineError(
            f"sbatch's answer can't be read: {told.strip()[:80]!r}", "See squeue --me."
        )
    return job


def cancel(job: str) -> None:
    """End a job, or all of an array; one that has ended stays so."""
    with suppress(EngineError):
        ask("scancel", "--quiet", job)


@dataclass
class Queue(host.SchedulerQuery):
    """What squeue says of this user's jobs.

    A task of an array is known by both numbers, an array as a whole by what goes on of it.
    """

    states: dict[str, tuple[str, str]] = field(default_factory=dict)

    def ask(self) -> None:
        told = host.ask(SQUEUE, NOT_HERE, timeout=settings().answer_within)
        lines = [line.strip() for line in told.splitlines() if line.strip()]
        if odd := [line for line in lines if not ROW.fullmatch(line)]:
            raise EngineError(f"squeue's answer can't be read: {odd[0][:80]!r}")
        rows = [line.split("|", 3) for line in lines]
        rows.sort(key=lambda row: (row[2] in GOES_ON, row[2] != "PENDING"))  # of a chain
        self.states = {name: (row[2], row[3]) for row in rows for name in row[:2]}

    def state(self, job: str) -> tuple[str, str]:
        """A job's state and its reason; "" for an unknown job. Raises ConnectionLost."""
        state, why = self.fresh().states.get(job, ("", ""))
        return state, "" if why == "None" else why
