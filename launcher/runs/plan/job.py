"""Protocols: `Backend` renders and starts a Plan; `Job` is an attempt of a run as it sees it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from launcher.base.errors import EngineError

if TYPE_CHECKING:
    from docker.api import APIClient

    from launcher.runs.plan.image_facts import ImageFacts
    from launcher.runs.plan.plan import Plan
    from launcher.runs.runfile.config import RunConfig


KILLED = 137
"""The exit code of what SIGKILL ended."""


class EndCause(Enum):
    """Who ended a job, as far as its backend knows: the runner's own words have more."""

    ITSELF = "itself"
    MEMORY = "out of memory"
    REMOVED = "removed from outside"
    ENGINE = "the engine was restarted"


@dataclass(frozen=True)
class ExitStatus:
    """How a job ended: its exit code, 128 + S for signal S, and the cause.

    `why` are words for it where the backend knows more than the output has: which node it was.
    `hosts` are the machines of its nodes, by their ranks, where a scheduler chose them.
    """

    code: int
    cause: EndCause = EndCause.ITSELF
    why: str = ""
    hosts: tuple[str, ...] = ()


class OutputPiece(NamedTuple):
    """A piece of a job's output, as it came: of stderr or stdout, and of which node."""

    is_error: bool
    data: bytes
    node: int = 0


class ConnectionLost(EngineError):
    """The connection to the engine was lost, for `reason`; the run itself may go on."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine was lost: {reason}")
        self.reason = reason


class Job(Protocol):
    """An attempt of a run as its backend sees it, started by any launcher of this machine.

    Every method raises `ConnectionLost` where the engine doesn't answer any more.
    """

    backend: str
    labels: Mapping[str, str]

    @property
    def run(self) -> str:
        """The run's id."""

    @property
    def handle(self) -> str:
        """What the backend knows the job by: a container's id, a process's."""

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        """What it has written since its beginning, and with `follow` until its end.

        Read again, each stream of each node has the same bytes, in other pieces and another order.
        """

    def wait(self) -> ExitStatus:
        """Wait for the end."""

    def ended(self) -> ExitStatus | None:
        """How it ended; None as long as it runs."""

    def state(self) -> str:
        """What it does as long as it hasn't ended: "running", "paused", or another word for it."""

    def stop(self, grace: int) -> None:
        """Ask it to stop, and after `grace` seconds kill it; returns when it has ended."""

    def kill(self) -> None:
        """End it at once."""

    def remove(self) -> None:
        """Leave nothing of it behind, running or not."""

    def files(self, path: str) -> dict[str, bytes]:
        """A file that the run sees, or those of a folder, by name; {} where there is none."""

    def diagnose(self) -> dict[str, bytes]:
        """A report of where its ranks are, by `agent.stall`: files by their names.

        {} where it has no ranks, or none that can be asked. Takes half a minute at most.
        """


class Backend(Protocol):
    """What a backend does. `request` is pure; `start` sends what it returns and nothing else.

    A class that derives from this one has these answers unless it gives its own.
    """

    name: str
    every_node: bool = False
    """Whether it starts all nodes of a run, on one machine, or one of them."""

    scheduled: bool = False
    """Whether a scheduler chooses the machines, so that this one says nothing of them."""

    has_engine: bool = False
    """Whether a container engine starts its runs, which is then asked for by `engine`."""

    @property
    def contained(self) -> bool:
        """Whether a run has files and packages of its own, or sees this machine's."""
        return True

    @property
    def tasks(self) -> Sequence[int]:
        """The numbers of an array's tasks, each to be a run; none of what is one run."""
        return ()

    @property
    def engine(self) -> APIClient | None:
        """The container engine that runs are started by, if any. Raises EngineError."""
        return None

    def configured(self, config: RunConfig) -> Backend:
        """The backend as a run file asks for it: a scheduler's has keys of its own there."""
        return self

    @property
    def shares_files(self) -> bool:
        """Whether a path of the run's host is the same file here."""

    def request(self, plan: Plan) -> Any:
        """What will be asked of the engine or scheduler."""

    def show(self, plan: Plan, *, full: bool = False) -> str:
        """The same as commands that work when pasted into a shell; `full` leaves no data out."""

    def facts(self, image: str) -> ImageFacts | None:
        """What is known of an image from itself; None where it isn't there."""

    def identity(self, image: str) -> Mapping[str, Any]:
        """What identifies an image: its name, "id", digests and labels.

        Where runs have none of their own, the versions that they see instead.
        """

    def rootless(self) -> bool:
        """Whether a container's root is the calling user outside."""

    def count_gpus(self) -> int | None:
        """How many GPUs a request for all would give; None where that isn't known."""

    def start(self, plan: Plan, *, attach: bool) -> Job:
        """Start the plan; with `attach`, the job's output is passed on without delay."""

    def start_array(self, plans: Mapping[int, Plan]) -> Sequence[Job]:
        """Start the runs that are an array's tasks, by their numbers."""
        return [self.start(plan, attach=False) for plan in plans.values()]

    def jobs(self) -> list[Job]:
        """What was started and not yet removed, newest first."""

    def shell(self, plan: Plan) -> list[str]:
        """The command, run in `environment`, that opens the plan's image for a person."""

    def inside(self, job: Job, argv: list[str], *, terminal: bool) -> list[str]:
        """The command, run in `environment`, that runs `argv` where `job` runs."""

    def environment(self) -> dict[str, str]:
        """The variables for `shell` and `inside`."""


def goes_on(job: Job) -> bool:
    """Whether it is known to."""
    try:
        return job.ended() is None
    except ConnectionLost:
        return False
