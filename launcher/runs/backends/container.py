"""A container of a Docker-compatible engine as a job, and the causes of its failures."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from io import BufferedReader
from typing import TYPE_CHECKING, Any, TypeVar, cast

from launcher.base.errors import EngineError
from launcher.base.names import LABEL
from launcher.runs.backends.host import tell
from launcher.runs.payload import diagnose
from launcher.runs.plan.job import KILLED, ConnectionLost, EndCause, ExitStatus, Job, OutputPiece
from launcher.runs.plan.plan import Plan, without_memlock

if TYPE_CHECKING:
    from docker.api import APIClient

StartedJob = TypeVar("StartedJob", bound=Job)
STDERR = 2
"""The number of this stream among a container's."""

FRAME = struct.Struct(">BxxxL")
"""What stands before each piece of output: the stream it is of, and its length in bytes."""

NO_LOG = 501
PROJECT = "com.docker.compose.project"
"""The label of what compose made, which is a run of the backend of that name."""

CONFLICT = 409
"""The engine's answer to a request to remove what is being removed, and to a name that is taken."""


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

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        """What the run has written from its beginning, and with `follow` until its end."""
        stream, self.stream = self.stream, None
        try:
            with answering():
                for kind, data in _attached(stream) if stream else self._recorded(follow):
                    yield OutputPiece(kind == STDERR, data)
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
            yield from _frames(response.raw.read)

    def wait(self) -> ExitStatus:
        try:
            with answering():
                code: int = self.api.wait(self.container)["StatusCode"]
        except missing():
            return ExitStatus(KILLED, EndCause.REMOVED)
        ended = self.ended() or ExitStatus(code)
        # One that ended by itself is removed by whoever follows it.
        return ExitStatus(code) if ended.cause is EndCause.REMOVED and code != KILLED else ended

    def inspected(self) -> dict[str, Any] | None:
        """The engine's "State" of the container; None where it has gone. Raises ConnectionLost."""
        try:
            with answering():
                return dict(self.api.inspect_container(self.container)["State"])
        except missing():
            return None

    def ended(self) -> ExitStatus | None:
        return ended_as(self.inspected())

    def state(self) -> str:
        return str((self.inspected() or {"Status": "removed"})["Status"])

    def stop(self, grace: int) -> None:
        with suppress(*failures()):  # it may have ended by itself
            self.api.stop(self.container, timeout=grace)
            self._remove_unstarted()

    def kill(self) -> None:
        with suppress(*failures()):
            self._remove_unstarted()
            self.api.kill(self.container)

    def _remove_unstarted(self) -> None:
        """A launcher that was killed between the two steps made it and didn't start it."""
        if (self.inspected() or {}).get("Status") == "created":
            self.remove()

    def remove(self) -> None:
        remove_container(self.api, self.container)

    def files(self, path: str) -> dict[str, bytes]:
        from launcher.runs.backends.group import unpacked

        try:
            with answering():
                stream, _ = self.api.get_archive(self.container, path)
                packed = b"".join(stream)
            return unpacked(packed) if packed else {}
        except missing():
            return {}

    def diagnose(self) -> dict[str, bytes]:
        from docker.errors import APIError

        from launcher.runs.backends.group import unpacked

        with answering():
            try:
                made = self.api.exec_create(self.container, diagnose(self.labels), stderr=False)
                return unpacked(self.api.exec_start(made["Id"]))
            except APIError:  # it has ended
                return {}


@cache
def failures() -> tuple[type[Exception], ...]:
    """What docker's SDK raises where an engine fails; imported where something has failed."""
    from docker.errors import DockerException
    from requests.exceptions import RequestException
    from urllib3.exceptions import HTTPError

    return DockerException, RequestException, HTTPError, OSError


def missing() -> type[Exception]:
    """What the SDK raises for what an engine doesn't have."""
    from docker.errors import NotFound

    return cast("type[Exception]", NotFound)


@contextmanager
def answering() -> Iterator[None]:
    """Raises ConnectionLost where the engine fails; a missing container is for the caller."""
    try:
        yield
    except Exception as error:
        if isinstance(error, failures()) and not isinstance(error, missing()):
            raise ConnectionLost(words_of(error)) from error
        raise


def ended_as(state: Mapping[str, Any] | None) -> ExitStatus | None:
    """How a container ended, by the engine's "State" of it; None has gone."""
    if state is None:
        return ExitStatus(KILLED, EndCause.REMOVED)
    if state["Running"] or state["Status"] in ("created", "restarting"):
        return None
    code: int = state["ExitCode"]
    if state["Status"] in ("removing", "dead"):
        return ExitStatus(code or KILLED, EndCause.REMOVED)
    return ExitStatus(code, EndCause.MEMORY if state.get("OOMKilled") else EndCause.ITSELF)


def with_memlock_if_allowed(start: Callable[[Plan], StartedJob], plan: Plan) -> StartedJob:
    """What `start` makes of the plan; of one without the memlock limit where that is refused."""
    try:
        return start(plan)
    except MemlockRefused:
        tell("the engine may not raise the limit of locked memory (memlock); going on without it")
        return start(without_memlock(plan))


def listed(api: APIClient) -> list[dict[str, Any]]:
    """The containers that a launcher started, running or ended, newest first."""
    with answering():
        found = api.containers(all=True, filters={"label": f"{LABEL}run"})
    return sorted(found, key=lambda one: int(one["Created"]), reverse=True)


def is_conflict(error: Exception) -> bool:
    return getattr(error, "status_code", None) == CONFLICT


def start_error(error: Exception, plan: Plan) -> Exception:
    """What to say of a container that didn't start: a known failure and its cure, or why."""
    from launcher.runs.explain.failures import explain

    reason = words_of(error)
    if "error setting rlimit" in reason and "memlock" in dict(plan.ulimits):
        return MemlockRefused()
    for sign in explain([reason.encode()]).signs:
        return EngineError(
            f"the container didn't start: {sign.failure.name}: {reason}", f"{sign.failure.remedy}."
        )
    return EngineError(f"the container didn't start: {reason}")


def words_of(error: Exception) -> str:
    """The engine's own words where it gave any, else those of the system below the SDK's."""
    told = getattr(error, "explanation", None)
    return str(told or _system(error) or error).strip()


def _system(error: object) -> str:
    """The system's error, among those that the SDK's is made of."""
    if isinstance(error, OSError) and isinstance(error.strerror, str):
        return error.strerror
    below = error.args if isinstance(error, BaseException) else error
    return next(filter(None, map(_system, below)), "") if isinstance(below, tuple) else ""


def _attached(stream: Any) -> Iterator[tuple[int, bytes]]:
    """The output of a container that was attached to, each piece with its stream's number."""
    if isinstance(stream, BufferedReader):
        return _frames(stream.read)
    from docker.utils.socket import frames_iter

    found: Iterator[tuple[int, bytes]] = frames_iter(stream, tty=False)
    return found


def _frames(read: Callable[[int], bytes]) -> Iterator[tuple[int, bytes]]:
    while len(header := read(FRAME.size)) == FRAME.size:
        kind, length = FRAME.unpack(header)
        yield kind, read(length)


def _hang_up(stream: Any) -> None:
    """End the connection for output: an engine that waits for a reader can't end a container."""
    with suppress(OSError, ValueError):  # over ssh, or hung up already
        socket.socket(fileno=os.dup(stream.fileno())).shutdown(socket.SHUT_RDWR)


def remove_container(api: APIClient, container: str) -> None:
    """Remove a container, running or not; where it stays, say so."""
    try:
        api.remove_container(container, v=True, force=True)
    except missing():
        return
    except failures() as error:
        if is_conflict(error):  # somebody else has asked for it
            return
        tell(f"the container is still there: {words_of(error)}; docker rm -f {container[:12]}")
