"""Docker's client for an engine, with a deadline for each request."""

from __future__ import annotations

from functools import partial
from typing import Any

from docker import DockerClient
from docker.api import APIClient
from docker.errors import APIError
from requests import PreparedRequest, Response
from requests.exceptions import ReadTimeout, Timeout

from launcher.base.deadline import within

WORK_SECONDS = 60.0


class Api(APIClient):  # type: ignore[misc]
    """Asks an engine: `timeout` is for the whole answer to a question, in seconds.

    What makes the engine work, such as the start of a container, has a minute more to begin its
    answer, and so has what is read as it comes; how long that goes on isn't limited.
    """

    def __init__(self, host: str, **how: Any) -> None:
        self.host = host
        super().__init__(host, **how)

    def send(self, request: PreparedRequest, **how: Any) -> Any:
        """The response. Raises ReadTimeout, which names the engine, where it comes too late."""
        send, seconds = partial(super().send, request), how.get("timeout")
        if seconds is None:
            return send(**how)
        if how.get("stream"):
            return send(**how | {"timeout": seconds + WORK_SECONDS})
        if request.method != "GET":
            return _said(send(**how | {"timeout": seconds + WORK_SECONDS}))
        try:
            return _said(within(seconds, partial(send, **how)))
        except Timeout as error:
            raise ReadTimeout(f"{self.host}: no answer within {seconds:g} s") from error


def _said(response: Response) -> Response:
    """A whole answer. Raises APIError for `null`, which stands for nothing that is asked."""
    if "json" in response.headers.get("Content-Type", "") and response.content.strip() == b"null":
        raise APIError(f"it answers null to {response.request.path_url}")
    return response


class Client(DockerClient):  # type: ignore[misc]
    """Docker's client, by such an Api."""

    def __init__(self, host: str, **how: Any) -> None:
        self.api = Api(host, **how)
