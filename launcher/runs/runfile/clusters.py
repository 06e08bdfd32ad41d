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
    """Settings of a Slurm job."""

    container: Literal["none", "docker", "podman", "pyxis", "apptainer"] = "none"
    """How a node starts the image. If not given: pyxis or apptainer, if the login node has it."""
    image: Text | None = None
    """The image for the nodes: a path to a .sqsh or .sif, or an image's name in a registry."""
    setup: Text | list[Line] | None = None
    """Shell commands that each node runs first: a text, or a list of lines."""
    gpu_type: Annotated[Text, Regex(r"[A-Za-z0-9][\w.-]*", "a type of GPUs: h100")] | None = None
    """The type of the GPUs, as sinfo shows it: h100."""
    time: Time | None = None
    """The job's time limit: 12:00:00."""
    partition: Line | None = None
    account: Line | None = None
    qos: Line | None = None
    constraint: Line | None = None
    reservation: Line | None = None
    dependency: Line | None = None
    exclude: Excluded | None = None
    """Nodes to leave out, as for sbatch; `auto`: those with two machine faults in seven days."""
    array: Array | None = None
    """Start one run for each number: 0-7. Or continue one run in a chain of 10 jobs: 0-9%1."""
    requeue: Flag = False
    """At the end of `time`, or if a node fails, queue the job again. The run then continues."""
    signal: Whole = 120
    """Save and stop the run this many seconds before the end of `time`; 0: never."""
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
    """Settings of a run on Kubernetes."""

    kind: Literal["jobset", "trainjob"] = "jobset"
    """The kind of object to create: jobset or trainjob."""
    runtime: Object = "torch-distributed"
    """The ClusterTrainingRuntime, for `kind: trainjob`."""
    context: Line | None = None
    """The context of the cluster; by default the one that kubectl uses."""
    namespace: Object | None = None
    """The namespace of the run; by default the one that kubectl uses."""
    image: Reference | None = None
    """The image that the nodes pull; by default the name of `image` in the run file."""
    image_pull_secrets: list[Object] = Field(default_factory=list)
    """Names of Secrets with the credentials of registries."""
    service_account: Object | None = None
    node_selector: dict[Line, Text] = Field(default_factory=dict)
    tolerations: list[Toleration] = Field(default_factory=list)
    priority_class: Object | None = None
    queue: Object | None = None
    """The LocalQueue of Kueue in which the run waits."""
    volumes: dict[Absolute, Volume] = Field(default_factory=dict)
    """The volume of each folder in the run file: {claim: NAME} or {host_path: /mnt}."""
    secrets: dict[
        Variable, Annotated[Text, Regex(r"[a-z0-9][a-z0-9.-]*/[\w.-]+", "wandb/api-key")]
    ] = Field(default_factory=dict)
    """Variables of the program. The value names a Secret and its key: wandb/api-key."""
    gpu: Line = "nvidia.com/gpu"
    """The name of the cluster's resource for GPUs."""
    resources: dict[Line, Line | Positive] = Field(default_factory=dict)
    """Further resources of each node: {rdma/ib: 8}."""
    per_gpu: dict[Line, Quantity] = Field(default_factory=dict)
    """CPUs and memory to request for each GPU: {cpu: 12, memory: 180Gi}."""
    exclude: ExcludedHosts | None = None
    """Names of nodes to leave out; `auto`: those with two machine faults in seven days."""
    pod: dict[Text, Any] = Field(default_factory=dict)
    """Changes to the pod's template, in its `metadata` and `spec`."""
    restarts: Whole = 0
    """How often the cluster restarts a failed run."""

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
