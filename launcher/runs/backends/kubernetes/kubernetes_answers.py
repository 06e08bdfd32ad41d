"""Models of kubectl's answers; unused fields are ignored, wrong ones refused."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from launcher.agent.checkpoints.lineage import ID
from launcher.base.errors import EngineError, first_fault
from launcher.base.names import LABEL
from launcher.runs.backends.group import seconds_since_1970

MOST_NODES = 100_000


def _time(text: str) -> str:
    seconds_since_1970(text)
    return text


def _nodes(annotations: dict[str, str]) -> dict[str, str]:
    """Raises ValueError where a run of ours has no number of nodes."""
    text = annotations.get(f"{LABEL}nodes", "1")
    if not (text.isascii() and text.isdecimal() and 1 <= int(text[:9]) <= MOST_NODES):
        raise ValueError(f"{text[:20]!r} is no number of nodes")
    return annotations


Time = Annotated[str, AfterValidator(_time)]
Strings = Annotated[dict[str, str], BeforeValidator(lambda value: {} if value is None else value)]
Number = Annotated[int, Field(ge=0, lt=1 << 31)]


class Condition(BaseModel):
    """Of a pod or a job."""

    type: str = ""
    status: str = ""
    reason: str | None = None
    message: str | None = None


class ContainerEnd(BaseModel):
    """How a container ended."""

    exitCode: Number
    reason: str | None = None
    finishedAt: Time | None = None


class ContainerState(BaseModel):
    """What a container does; `running` only has to be there."""

    running: dict[str, Any] | None = None
    waiting: Condition | None = None
    terminated: ContainerEnd | None = None


class ContainerStatus(BaseModel):
    """Of a pod, what became of it."""

    name: str
    state: ContainerState | None = None
    lastState: ContainerState | None = None


class Status(BaseModel):
    """Of an object."""

    phase: str | None = None
    reason: str | None = None
    message: str | None = None
    conditions: list[Condition] | None = None
    containerStatuses: list[ContainerStatus] | None = None


class Metadata(BaseModel):
    """Of an object; its labels hold the run's id."""

    name: str
    uid: str | None = None
    creationTimestamp: str | None = None
    labels: Strings = {}
    annotations: Annotated[Strings, AfterValidator(_nodes)] = {}


class Policy(BaseModel):
    """How often a job set is started again."""

    maxRestarts: Number | None = None


class Spec(BaseModel):
    """Of a job, or of a pod."""

    suspend: bool | None = None
    failurePolicy: Policy | None = None
    nodeName: str | None = None


class Item(BaseModel):
    """An object of the cluster."""

    kind: str
    metadata: Metadata
    status: Status | None = None
    spec: Spec | None = None


class ObjectList(BaseModel):
    """The answer to `kubectl get --output=json`."""

    items: list[Item]


def listing(text: str, label: str) -> list[dict[str, Any]]:
    """The objects of an answer; all but pods have a run's id by `label`. Raises EngineError."""
    try:
        found = ObjectList.model_validate(json.loads(text)).items
    except ValidationError as error:
        raise EngineError(f"kubectl's answer can't be read: {first_fault(error)}") from None
    except (ValueError, RecursionError):
        raise EngineError("kubectl's answer can't be read: it isn't JSON") from None
    for one in found:
        run = one.metadata.labels.get(label, "")
        if one.kind != "Pod" and not re.fullmatch(ID, run):  # it names a folder
            raise EngineError(f"kubectl's answer can't be read: {run[:40]!r} is no run's id")
    return [one.model_dump(exclude_none=True) for one in found]
