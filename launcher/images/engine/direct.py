"""Asks an engine at a socket of this machine what a run needs, without docker's SDK.

The SDK with all that it imports was a third of a launch.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from docker.api import APIClient

WORK_SECONDS = 60.0
"""What makes the engine work, such as the start of a container, has so much more time."""

ABSENT = 404


class Deadline:
    """The end of so many seconds from now on; None: whenever that comes."""

    def __init__(self, seconds: float | None) -> None:
        self.seconds, self._begun = seconds, time.monotonic()

    @property
    def left(self) -> float | None:
        """The seconds that are left, as a socket's time limit: above 0."""
        return self.seconds and max(self._begun + self.seconds - time.monotonic(), 0.001)


class DirectApi:
    """The engine at `host`, `unix://PATH`: by the SDK's names what a run asks of it.

    All else is the SDK's, imported for it. `timeout` is for a whole answer, in seconds. Raises the
    SDK's errors.
    """

    base_url = "http+docker://localhost"

    def __init__(self, host: str, api_version: str, timeout: float) -> None:
        self.host, self.api_version, self.timeout = host, api_version, timeout
        self._info: Any = None
        self._asking = Lock()

    @cached_property
    def _sdk(self) -> APIClient:
        from launcher.images.engine.client import Api

        return Api(self.host, version=self.api_version, timeout=self.timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sdk, name)

    def info(self) -> Any:
        """What the engine says of itself; asked once."""
        with self._asking:
            self._info = self._info or self._json("GET", "/info")
            return self._info

    def inspect_image(self, image: str) -> Any:
        return self._json("GET", f"/images/{quote(image, '/:')}/json")

    def containers(self, *, all: bool, filters: Mapping[str, str]) -> Any:
        wanted = json.dumps({key: [value] for key, value in filters.items()})
        return self._json("GET", f"/containers/json?{urlencode({'all': +all, 'filters': wanted})}")

    def create_container_from_config(self, body: Mapping[str, Any], name: str) -> Any:
        path = f"/containers/create?{urlencode({'name': name})}"
        return self._json("POST", path, json.dumps(body).encode())

    def inspect_container(self, container: str) -> Any:
        return self._json("GET", f"/containers/{quote(container)}/json")

    def start(self, container: str) -> None:
        self._answer("POST", f"/containers/{container}/start")

    def wait(self, container: str) -> Any:
        return self._json("POST", f"/containers/{container}/wait", limited=False)

    def remove_container(self, container: str, *, v: bool, force: bool) -> None:
        self._answer("DELETE", f"/containers/{container}?{urlencode({'v': v, 'force': force})}")

    def get_archive(self, container: str, path: str) -> tuple[list[bytes], None]:
        """The tar of a path in a container; nothing where that isn't there."""
        query = urlencode({"path": path})
        return [self._answer("GET", f"/containers/{container}/archive?{query}", absent=True)], None

    def attach_socket(self, container: str, params: Mapping[str, int]) -> BinaryIO:
        """The container's output from now on, in frames; its input is open as long as this is."""
        path = f"/containers/{container}/attach?{urlencode(params)}"
        until = Deadline(self.timeout + WORK_SECONDS)
        sent = self._send("POST", path, b"", until, "Upgrade: tcp", "Connection: Upgrade")
        with closing(sent) as connection:
            head = b""
            while not head.endswith(b"\r\n\r\n") and (byte := self._receive(connection, until, 1)):
                head += byte  # one by one: what follows is the container's
            if not 0 < _status(head) < 400:
                self._check(path, head, b"".join(self._pieces(connection, until)))
            connection.settimeout(None)
            return connection.makefile("rb")  # which keeps it open

    def _json(self, method: str, path: str, body: bytes = b"", **how: bool) -> Any:
        answer = self._answer(method, path, body, **how)
        try:
            found = json.loads(answer)
        except ValueError as error:
            raise self._lost(f"it answers no JSON to {path}") from error
        if found is None:
            from docker.errors import APIError

            raise APIError(f"it answers null to {path}")
        return found

    def _answer(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        limited: bool = True,
        absent: bool = False,
    ) -> bytes:
        """The body of the whole answer; where it isn't `limited`, whenever that comes.

        What may be `absent` is b"" then.
        """
        seconds = self.timeout + (0 if method == "GET" else WORK_SECONDS)
        until = Deadline(seconds if limited else None)
        with closing(self._send(method, path, body, until)) as connection:
            answer = b"".join(self._pieces(connection, until))
        head, _, content = answer.partition(b"\r\n\r\n")
        if absent and _status(head) == ABSENT:
            return b""
        self._check(path, head, content)
        return content

    def _send(
        self, method: str, path: str, body: bytes, until: Deadline, *fields: str
    ) -> socket.socket:
        """A connection for this request. HTTP/1.0: its answer is one piece, to the end."""
        lines = [f"{method} /v{self.api_version}{path} HTTP/1.0", "Host: engine", *fields]
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}", "", ""]
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(until.left)
            connection.connect(self.host.removeprefix("unix://"))
            connection.sendall("\r\n".join(lines).encode() + body)
        except OSError as error:
            connection.close()
            raise self._lost(error, until.seconds) from error
        return connection

    def _pieces(self, connection: socket.socket, until: Deadline) -> Iterator[bytes]:
        while piece := self._receive(connection, until, 1 << 16):
            yield piece

    def _receive(self, connection: socket.socket, until: Deadline, most: int) -> bytes:
        """Some of the answer, at most so many bytes; b"" at its end."""
        try:
            connection.settimeout(until.left)
            return connection.recv(most)
        except OSError as error:
            raise self._lost(error, until.seconds) from error

    def _check(self, path: str, head: bytes, content: bytes) -> None:
        """Raise what the SDK does for an answer that refuses, or breaks off."""
        lines = (line.lower().partition(b":") for line in head.split(b"\r\n")[1:])
        length = {name: value.strip() for name, _, value in lines}.get(b"content-length")
        if not _status(head) or (length and int(length) != len(content)):
            raise self._lost("the answer breaks off")
        if _status(head) >= 400:
            _refuse(_status(head), path, content)

    def _lost(self, why: OSError | str, seconds: float | None = None) -> Exception:
        """The SDK's error for an engine that doesn't answer, or not within so many seconds."""
        from requests.exceptions import ConnectionError as Lost
        from requests.exceptions import ReadTimeout

        if isinstance(why, TimeoutError):
            return ReadTimeout(f"{self.host}: no answer within {seconds:g} s")
        return Lost(why)


class DirectClient:
    """The SDK's client of an engine at a socket, of which a run asks only `api`."""

    def __init__(self, host: str, api_version: str, timeout: float) -> None:
        self.api = DirectApi(host, api_version, timeout)

    def __getattr__(self, name: str) -> Any:
        from launcher.images.engine.client import Client

        api = self.api
        return getattr(Client(api.host, version=api.api_version, timeout=api.timeout), name)


def _status(head: bytes) -> int:
    """The status of an answer; 0 where there is none."""
    words = head.split(b" ", 2)
    return int(words[1][:3]) if len(words) > 1 and words[1][:3].isdigit() else 0


def _refuse(status: int, path: str, content: bytes) -> None:
    """Raise the SDK's error for an engine's refusal."""
    from docker.errors import create_api_error_from_http_exception
    from requests import HTTPError, Response

    response = Response()
    response.status_code, response.url, response._content = status, path, content
    create_api_error_from_http_exception(HTTPError(f"{status} for {path}", response=response))
