"""The sections `slurm` and `kubernetes` of a run file."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from launcher.runs.runfile.values import (
    Absolute,
    Flag,
    Line,
    Object,
    Positive,
    Reference,
    Regex,
    Strict,
    Text,
    Time,
    Variable,
    Whole,
)

OURS = frozenset(
    "nodes ntasks ntasks-per-node gpus-per-node mem job-name output error open-mode no-requeue "
    "wrap parsable".split()
)
"""Options of sbatch that follow from the rest of a run file, or with which a job is no run."""

MOST_TASKS = 1000
"""As many as a cluster takes of its own (MaxArraySize, man slurm.conf): each has a record."""

SPAN = r"(\d{1,7})(?:-(\d{1,7}))?(?::([1-9]\d{0,6}))?"
Array = Annotated[
    Text,
    BeforeValidator(lambda value: str(value) if type(value) is int else value),
    Regex(rf"{SPAN}(,{SPAN})*(%[1-9]\d*)?", "0-7, 1,3,5 or 0-9%2"),
]


def _tasks(array: str) -> list[int]:
    """The numbers of an array, as sbatch reads them. Raises ValueError where there are too many."""
    found = set[int]()
    for first, last, step in re.findall(SPAN, array.partition("%")[0]):
        found |= {*range(int(first), int(last or first) + 1, int(step or 1))[: MOST_TASKS + 1]}
    if not 0 < len(found) <= MOST_TASKS:
        raise ValueError(f"array: {array} has no task, or more than {MOST_TASKS}")
    return sorted(found)


class Exclude(Strict):
    """`auto`, or its numbers: leave out what failed so often in so many days of its own cause."""

    failures: Positive = 2
    days: Positive = 7


def _exclude(value: object) -> object:
    """`exclude: auto` for the usual numbers; Slurm's own text, and a list, name nodes."""
    return {} if value == "auto" else value


_NUMBERS = {name: {"type": "integer", "minimum": 1} for name in Exclude.model_fields}
_AUTO = (
    {"const": "auto"},
    {"type": "object", "properties": _NUMBERS, "additionalProperties": False},
)
_NAMES = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Excluded = Annotated[
    Exclude | Line,
    BeforeValidator(_exclude),
    WithJsonSchema({"anyOf": [*_AUTO, {"type": "string", "minLength": 1}]}),
]
ExcludedHosts = Annotated[
    Exclude | Annotated[list[Object], Field(min_length=1)],
    BeforeValidator(_exclude),
    WithJsonSchema({"anyOf": [*_AUTO, _NAMES]}),
]
Quantity = Annotated[
    Text,
    BeforeValidator(lambda value: str(value) if type(value) in (int, float) else value),
    Regex(r"\d+(\.\d+)?[A-Za-z]*", "a quantity: 12, 0.5 or 64Gi"),
    WithJsonSchema({"type": ["number", "string"]}),
]


class Slurm(Strict):
    """What a job asks of Slurm."""

    container: Literal["none", "docker", "podman", "pyxis", "apptainer"] = "none"
    """What ranks run in. Not given: pyxis or apptainer, whichever is here, else refused."""
    image: Text | None = None
    """What the nodes know the image by: a .sqsh, a .sif or a registry's name."""
    setup: Text | list[Line] | None = None
    """Shell that each node runs first, as text or a list of lines: modules, or a venv."""
    gpu_type: Annotated[Text, Regex(r"[A-Za-z0-9][\w.-]*", "a type of GPUs: h100")] | None = None
    """The type of the GPUs, as sinfo shows it: h100."""
    time: Time | None = None
    """The time limit."""
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    dependency: Line | None = None
    exclude: Excluded | None = None
    """Nodes to leave out, as sbatch takes them; `auto` for those that failed before."""
    array: Array | None = None
    """A run for each task: 0-7; with %1 one run in a chain of jobs."""
    requeue: Flag = False
    """At the end of `time`, and after a failed node, the job waits again and goes on."""
    signal: Whole = 120
    """Seconds before the end of `time` at which the run saves and stops; 0 is never."""
    options: dict[Annotated[Text, Regex(r"[a-z][a-z-]+", "mail-user")], Line | int | bool] = Field(
        default_factory=dict
    )
    """Further options of sbatch, by their long names."""

    @model_validator(mode="after")
    def _one_place(self) -> Slurm:
        """What has a key of its own, or is the launcher's to say, isn't given twice."""
        if self.is_chain and self.requeue:
            raise ValueError("requeue goes on with a run, and so does an array of %1: take one")
        _tasks(self.array or "0")
        for name in self.options:
            if name in (*Slurm.model_fields, *OURS):
                raise ValueError(f"options.{name}: it has a key of its own, or is the launcher's")
        return self

    @property
    def setup_lines(self) -> list[str]:
        """The lines of `setup`."""
        asked = self.setup or []
        return asked.splitlines() if isinstance(asked, str) else [*asked]

    @property
    def is_chain(self) -> bool:
        """Whether its jobs come one after the other, and are one run."""
        return bool(self.array and self.array.endswith("%1"))

    @property
    def tasks(self) -> list[int]:
        """The numbers of an array's tasks, each a run; [] of what is one run."""
        return _tasks(self.array) if self.array and not self.is_chain else []


class Volume(Strict):
    """Where a folder lies in a cluster: on a claim, from its root on, or on the nodes' disks."""

    claim: Object | None = None
    host_path: Absolute | None = None

    @model_validator(mode="after")
    def _one(self) -> Volume:
        if (self.claim is None) == (self.host_path is None):
            raise ValueError("give claim or host_path, one of both")
        return self


class Toleration(Strict):
    """A taint of nodes that a run puts up with."""

    key: Line | None = None
    operator: Literal["Exists", "Equal"] | None = None
    value: Line | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None


class Kubernetes(Strict):
    """What a run asks of a cluster."""

    kind: Literal["jobset", "trainjob"] = "jobset"
    """The object that is created."""
    runtime: Object = "torch-distributed"
    """The ClusterTrainingRuntime of a trainjob."""
    context: Line | None = None
    """kubectl's own by default."""
    namespace: Object | None = None
    """kubectl's own by default."""
    image: Reference | None = None
    """What the nodes pull, where that isn't the image's name."""
    image_pull_secrets: list[Object] = Field(default_factory=list)
    """Names of Secrets."""
    service_account: Object | None = None
    node_selector: dict[Line, Text] = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)
    priority_class: Object | None = None
    queue: Object | None = None
    """A local queue of Kueue, by which the run waits."""
    volumes: dict[Absolute, Volume] = Field(default_factory=dict)
    """Where the folders lie that the rest of the file names: {claim: NAME} or {host_path: /mnt}."""
    secrets: dict[
        Variable, Annotated[Text, Regex(r"[a-z0-9][a-z0-9.-]*/[\w.-]+", "wandb/api-key")]
    ] = Field(default_factory=dict)
    """Variables, each with a Secret and its key: wandb/api-key."""
    gpu: Line = "nvidia.com/gpu"
    """What the cluster calls a GPU."""
    resources: dict[Line, Line | Positive] = Field(default_factory=dict)
    """Further limits of a node: rdma/ib."""
    per_gpu: dict[Line, Quantity] = Field(default_factory=dict)
    """Requested with each GPU: cpu, memory."""
    exclude: ExcludedHosts | None = None
    """Names of nodes to leave out; `auto` for those that failed before."""
    pod: dict[Text, Any] = Field(default_factory=dict)
    """Laid over the pod's template: metadata and spec."""
    restarts: Whole = 0
    """How often the cluster starts a run that failed again."""

    @model_validator(mode="after")
    def _one_place(self) -> Kubernetes:
        """What has a key of its own isn't given twice, nor what a trainjob can't say."""
        for name in ("memory", self.gpu):
            if name in self.resources:
                raise ValueError(f"resources.{name}: resources.memory and gpus ask for it")
        if both := sorted(self.resources.keys() & self.per_gpu.keys()):
            raise ValueError(f"per_gpu.{both[0]}: resources has it as well: take one")
        if self.kind == "trainjob" and (self.priority_class or self.restarts):
            raise ValueError("a trainjob has priority_class and restarts from its runtime")
        return self
