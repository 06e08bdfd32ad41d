"""A run as a container of a Docker-compatible engine: start, output, end, stop, remove."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from docker.api import APIClient
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.utils.socket import STDERR, frames_iter
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from launcher.backends.docker import request
from launcher.backends.host import tell
from launcher.errors import EngineError
from launcher.names import LABEL
from launcher.plan.job import KILLED, Cause, Ended, Job, Lost, Piece
from launcher.plan.plan import Plan, without_memlock

StartedJob = TypeVar("StartedJob", bound=Job)
FAILURES = (DockerException, RequestException, HTTPError, OSError)
OUTPUT = {"stdout": 1, "stderr": 1, "stream": 1}
FRAME = struct.Struct(">BxxxL")
"""What stands before each piece of output: the stream it is of, and its length in bytes."""

NO_LOG = 501
PROJECT = "com.docker.compose.project"
"""The label of what compose made, which is a run of the backend of that name."""

CONFLICT = 409
"""The engine's answer to a request to remove what is being removed, and to a name that is taken."""

REMOVAL_SECONDS = 30.0
RETRY_SECONDS = 0.2


GONE, ENDED, GOES_ON, FOREIGN = "gone", "ended", "goes on", "foreign"
"""What holds a name that a container was to have."""


class MemlockRefused(Exception):
    """The engine may not raise the limit of locked memory."""


@dataclass
class DockerJob:
    """A container that a launcher started, this one or another.

    `stream` is its output from its first byte on, where it was attached to before it started.
    """

    api: APIClient
    container: str
    labels: Mapping[str, str]
    stream: Any = field(default=None, repr=False)

    backend = "docker"

    @property
    def run(self) -> str:
        return self.labels.get(f"{LABEL}run", "")

    @property
    def handle(self) -> str:
        return self.container

    def output(self, *, follow: bool = True) -> Iterator[Piece]:
        """What the run has written from its beginning, and with `follow` until its end."""
        stream, self.stream = self.stream, None
        try:
            with answering():
                frames = frames_iter(stream, tty=False) if stream else self._recorded(follow)
                for kind, data in frames:
                    yield Piece(kind == STDERR, data)
        finally:
            if stream:
                _hang_up(stream)

    def _recorded(self, follow: bool) -> Iterator[tuple[int, bytes]]:
        """The engine's record of the output; docker's own `logs` merges the two streams."""
        api = self.api
        address = f"{api.base_url}/v{api.api_version}/containers/{self.container}/logs"
        wanted = {"stdout": 1, "stderr": 1, "follow": int(follow)}
        with api.get(address, params=wanted, stream=True, timeout=None) as response:
            if response.status_code == NO_LOG:
                raise EngineError(
                    f"the engine keeps no log that can be read: {response.json()['message']}",
                    "Its log driver has to be json-file, local or journald.",
                )
            response.raise_for_status()
            while len(header := response.raw.read(FRAME.size)) == FRAME.size:
                kind, length = FRAME.unpack(header)
                yield kind, response.raw.read(length)

    def wait(self) -> Ended:
        try:
            with answering():
                code: int = self.api.wait(self.container)["StatusCode"]
        except NotFound:
            return Ended(KILLED, Cause.REMOVED)
        ended = self.ended() or Ended(code)
        # One that ended by itself is removed by whoever follows it.
        return Ended(code) if ended.cause is Cause.REMOVED and code != KILLED else ended

    def inspected(self) -> dict[str, Any] | None:
        """The engine's "State" of the container; None where it has gone. Raises Lost."""
        with suppress(NotFound), answering():
            return dict(self.api.inspect_container(self.container)["State"])
        return None

    def ended(self) -> Ended | None:
        return ended_as(self.inspected())

    def state(self) -> str:
        return str((self.inspected() or {"Status": "removed"})["Status"])

    def stop(self, grace: int) -> None:
        with suppress(*FAILURES):  # it may have ended by itself
            self.api.stop(self.container, timeout=grace)
            self._remove_unstarted()

    def kill(self) -> None:
        with suppress(*FAILURES):
            self._remove_unstarted()
            self.api.kill(self.container)

    def _remove_unstarted(self) -> None:
        """A launcher that was killed between the two steps made it and didn't start it."""
        if (self.inspected() or {}).get("Status") == "created":
            self.remove()

    def remove(self) -> None:
        remove_container(self.api, self.container)

    def files(self, path: str) -> dict[str, bytes]:
        from launcher.backends.group import unpacked

        with suppress(NotFound), answering():
            stream, _ = self.api.get_archive(self.container, path)
            return unpacked(b"".join(stream))
        return {}

    def diagnose(self) -> dict[str, bytes]:
        from launcher.backends.group import DIAGNOSE, unpacked

        with answering():
            try:
                made = self.api.exec_create(self.container, DIAGNOSE, stderr=False)
                return unpacked(self.api.exec_start(made["Id"]))
            except APIError:  # it has ended
                return {}


@contextmanager
def answering() -> Iterator[None]:
    """Raises Lost where the engine fails; that there is no such container is for the caller."""
    try:
        yield
    except NotFound:
        raise
    except FAILURES as error:
        raise Lost(words_of(error)) from error


def ended_as(state: Mapping[str, Any] | None) -> Ended | None:
    """How a container ended, by the engine's "State" of it; None has gone."""
    if state is None:
        return Ended(KILLED, Cause.REMOVED)
    if state["Running"] or state["Status"] in ("created", "restarting"):
        return None
    code: int = state["ExitCode"]
    if state["Status"] in ("removing", "dead"):
        return Ended(code or KILLED, Cause.REMOVED)
    return Ended(code, Cause.MEMORY if state.get("OOMKilled") else Cause.ITSELF)


def start(api: APIClient, plan: Plan, *, attach: bool) -> DockerJob:
    """The started container of `plan`; without the memlock limit where the engine may not.

    Raises EngineError, and leaves no container, where it doesn't start.
    """
    return with_memlock_if_allowed(lambda plan: _start(api, plan, attach=attach), plan)


def with_memlock_if_allowed(start: Callable[[Plan], StartedJob], plan: Plan) -> StartedJob:
    """What `start` makes of the plan; of one without the memlock limit where that is refused."""
    try:
        return start(plan)
    except MemlockRefused:
        tell("the engine may not raise the limit of locked memory (memlock); going on without it")
        return start(without_memlock(plan))


def _start(api: APIClient, plan: Plan, *, attach: bool) -> DockerJob:
    container = _create(api, plan)
    try:
        # Attached before it starts: no output is lost, and none is waited for. The standard
        # input of a tied run stays open for as long as this process holds the connection.
        params = OUTPUT | ({"stdin": 1} if plan.tie else {})
        stream = api.attach_socket(container, params=params) if attach else None
        api.start(container)
    except (DockerException, RequestException) as error:
        remove_container(api, container)
        raise start_error(error, plan) from error
    except BaseException:
        remove_container(api, container)
        raise
    return DockerJob(api, container, dict(plan.labels), stream=stream)


def _create(api: APIClient, plan: Plan) -> str:
    wanted = request(plan)
    try:
        body = wanted.body | {"Env": [*_environment(wanted.body["Env"]), *_compared(api, plan)]}
        return _created(api, body, wanted.name, plan.run)
    except ImageNotFound as error:
        raise EngineError(f"no image {plan.image}") from error
    except (DockerException, RequestException) as error:
        if _is_conflict(error):
            raise _name_taken(api, wanted.name, plan.run) from error
        raise start_error(error, plan) from error


def _compared(api: APIClient, plan: Plan) -> list[str]:
    """What the nodes of a run compare, and can't see from inside: the image and this launcher."""
    if plan.nodes == 1:
        return []
    from launcher.train.ranks import alike

    layers = api.inspect_image(plan.image)["RootFS"].get("Layers")
    return [f"{alike.IMAGE}={layers}", f"{alike.OUTSIDE}={alike.launcher_digest()}"]


def _created(api: APIClient, body: dict[str, Any], name: str, run: str) -> str:
    """The container's id; while the run's attempt before is being removed, that is waited for."""
    until = time.monotonic() + REMOVAL_SECONDS
    while True:
        try:
            return str(api.create_container_from_config(body, name)["Id"])
        except APIError as error:
            waiting = time.monotonic() < until and _holder(api, name, run) in (GONE, ENDED)
            if not (_is_conflict(error) and waiting):
                raise
        time.sleep(RETRY_SECONDS)


def _holder(api: APIClient, name: str, run: str) -> str:
    """Whose container has a name: GONE, ENDED or GOES_ON of the same run, else FOREIGN."""
    try:
        found = api.inspect_container(name)
    except NotFound:
        return GONE
    if (found["Config"]["Labels"] or {}).get(f"{LABEL}run") != run:
        return FOREIGN
    going_on = found["State"]["Running"] or found["State"]["Status"] == "created"
    return GOES_ON if going_on else ENDED


def _name_taken(api: APIClient, name: str, run: str) -> EngineError:
    """What to say where another container has the name, and keeps it."""
    holder = FOREIGN
    with suppress(*FAILURES):
        holder = _holder(api, name, run)
    if holder == GOES_ON:
        remedy = f"Follow it with `python3 -m launcher attach {run}`, or stop it."
        return EngineError(f"run {run} goes on already, in the container {name}", remedy)
    return EngineError(f"there is a container {name} already", f"docker rm -f {name}")


def _is_conflict(error: Exception) -> bool:
    return isinstance(error, APIError) and error.status_code == CONFLICT


def jobs(api: APIClient) -> list[DockerJob]:
    """The containers that a launcher started, running or ended, newest first."""
    with answering():
        found = api.containers(all=True, filters={"label": f"{LABEL}run"})
    newest = sorted(found, key=lambda one: int(one["Created"]), reverse=True)
    alone = (one for one in newest if PROJECT not in one["Labels"])
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


def start_error(error: Exception, plan: Plan) -> Exception:
    """What to say of a container that didn't start: a known failure and its cure, or why."""
    from launcher.records.failures import explain

    reason = words_of(error)
    if "error setting rlimit" in reason and "memlock" in dict(plan.ulimits):
        return MemlockRefused()
    for sign in explain([reason.encode()]).signs:
        return EngineError(
            f"the container didn't start: {sign.failure.name}: {reason}", f"{sign.failure.cure}."
        )
    return EngineError(f"the container didn't start: {reason}")


def words_of(error: Exception) -> str:
    """The engine's own words where it gave any, else those of the system below the SDK's."""
    told = error.explanation if isinstance(error, APIError) else None
    return str(told or _system(error) or error).strip()


def _system(error: object) -> str:
    """What the system said, somewhere among the errors that the SDK's is made of."""
    if isinstance(error, OSError) and isinstance(error.strerror, str):
        return error.strerror
    below = error.args if isinstance(error, BaseException) else error
    return next(filter(None, map(_system, below)), "") if isinstance(below, tuple) else ""


def _hang_up(stream: Any) -> None:
    """End the connection for output: an engine that waits for a reader can't end a container."""
    with suppress(OSError, ValueError):  # over ssh, or hung up already
        socket.socket(fileno=os.dup(stream.fileno())).shutdown(socket.SHUT_RDWR)


def remove_container(api: APIClient, container: str) -> None:
    """Remove a container, running or not; where it stays, tell."""
    try:
        api.remove_container(container, v=True, force=True)
    except NotFound:
        return
    except FAILURES as error:
        if _is_conflict(error):  # somebody else has asked for it
            return
        tell(f"the container is still there: {words_of(error)}; docker rm -f {container[:12]}")
