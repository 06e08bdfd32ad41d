"""A run as a container of a Docker-compatible engine: start, output, end, stop, remove."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from launcher.agent.words import IMAGE
from launcher.base.errors import EngineError
from launcher.base.names import LABEL
from launcher.runs import payload
from launcher.runs.backends.container import (
    PROJECT,
    DockerJob,
    failures,
    is_conflict,
    listed,
    missing,
    remove_container,
    start_error,
    with_memlock_if_allowed,
    words_of,
)
from launcher.runs.backends.docker.docker_request import LOCAL, request
from launcher.runs.plan.plan import Plan

if TYPE_CHECKING:
    from docker.api import APIClient

ENFORCED = "/sys/fs/selinux/enforce"
OUTPUT = {"stdout": 1, "stderr": 1, "stream": 1}
REMOVAL_SECONDS = 30.0
RETRY_SECONDS = 0.2
GONE, ENDED, GOES_ON, FOREIGN = "gone", "ended", "goes on", "foreign"
"""What holds a name that a container was to have."""


def start(api: APIClient, plan: Plan, *, attach: bool) -> DockerJob:
    """The started container of `plan`; without the memlock limit where the engine may not.

    Raises EngineError, and leaves no container, where it doesn't start.
    """
    return with_memlock_if_allowed(lambda plan: _start(api, plan, attach=attach), plan)


def _start(api: APIClient, plan: Plan, *, attach: bool) -> DockerJob:
    container = _with_payload(api, plan)
    try:
        # Attached before it starts: no output is lost, and none is waited for. The standard
        # input of a tied run stays open for as long as this process holds the connection.
        params = OUTPUT | ({"stdin": 1} if plan.tie else {})
        stream = api.attach_socket(container, params=params) if attach else None
        api.start(container)
    except failures() as error:
        remove_container(api, container)
        raise start_error(error, plan) from error
    except BaseException:
        remove_container(api, container)
        raise
    return DockerJob(api, container, dict(plan.labels), stream=stream)


def _with_payload(api: APIClient, plan: Plan) -> str:
    """The created container with its payload: mounted, or copied where the engine can't see it.

    It can't where it is on another machine or in another mount namespace, as a snap's is, and
    SELinux lets containers read no files of the user's.
    """
    sent = plan.payload_mount
    if sent is None or (str(api.base_url) == LOCAL and not os.path.exists(ENFORCED)):
        try:
            return _create(api, plan)
        except EngineError as error:
            if sent is None or sent.source not in error.problem:
                raise
    container = _create(api, plan.without_payload())
    try:
        packed = payload.archive(sent.source.removesuffix("/launcher"))
        api.put_archive(container, "/", packed)
    except failures() as error:
        remove_container(api, container)
        raise EngineError(
            f"the launcher's payload can't be copied into the container: {words_of(error)}"
        ) from error
    return container


def _create(api: APIClient, plan: Plan) -> str:
    wanted = request(plan)
    try:
        body = wanted.body | {"Env": [*_environment(wanted.body["Env"]), *_compared(api, plan)]}
        return _created(api, body, wanted.name, plan.run)
    except failures() as error:
        if type(error).__name__ == "ImageNotFound":
            raise EngineError(f"no image {plan.image}") from error
        if is_conflict(error):
            raise _name_taken(api, wanted.name, plan.run) from error
        raise start_error(error, plan) from error


def _compared(api: APIClient, plan: Plan) -> list[str]:
    """What the nodes of a run compare, and can't see from inside: the image."""
    if plan.nodes == 1:
        return []
    layers = api.inspect_image(plan.image)["RootFS"].get("Layers")
    return [f"{IMAGE}={layers}"]


def _created(api: APIClient, body: dict[str, Any], name: str, run: str) -> str:
    """The container's id; while the run's attempt before is being removed, that is waited for."""
    until = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            return str(api.create_container_from_config(body, name)["Id"])
        except failures() as error:
            waiting = is_conflict(error) and time.monotonic() < until
            if not (waiting and _holder(api, name, run) in (GONE, ENDED)):
                raise
        time.sleep(RETRY_SECONDS)


def _holder(api: APIClient, name: str, run: str) -> str:
    """Whose container has a name: GONE, ENDED or GOES_ON of the same run, else FOREIGN."""
    try:
        found = api.inspect_container(name)
    except missing():
        return GONE
    if (found["Config"]["Labels"] or {}).get(f"{LABEL}run") != run:
        return FOREIGN
    going_on = found["State"]["Running"] or found["State"]["Status"] == "created"
    return GOES_ON if going_on else ENDED


def _name_taken(api: APIClient, name: str, run: str) -> EngineError:
    """What to say where another container has the name, and keeps it."""
    holder = FOREIGN
    with suppress(*failures()):
        holder = _holder(api, name, run)
    if holder == GOES_ON:
        remedy = f"Follow it with `launcher attach {run}`, or stop it."
        return EngineError(f"run {run} goes on already, in the container {name}", remedy)
    return EngineError(f"there is a container {name} already", f"docker rm -f {name}")


def jobs(api: APIClient) -> list[DockerJob]:
    """The containers that a launcher started, running or ended, newest first."""
    alone = (one for one in listed(api) if PROJECT not in one["Labels"])
    return [DockerJob(api, one["Id"], one["Labels"]) for one in alone]


def _environment(variables: list[str]) -> list[str]:
    """The variables; one without a value takes the launcher's own.

    With neither, the bare name stays, which unsets the image's own: as docker's program has it.
    """
    named = [(variable.partition("="), variable) for variable in variables]
    return [
        whole if equals or name not in os.environ else f"{name}={os.environ[name]}"
        for (name, equals, _), whole in named
    ]
