"""What images take, and what BuildKit keeps of removed ones, as its records show it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import docker
import pytest
import requests
from docker.errors import APIError, DockerException

from launcher.engine import disk


def answering(df: Callable[[], dict[str, Any]]) -> docker.DockerClient:
    api = SimpleNamespace(timeout=600)
    return cast("docker.DockerClient", SimpleNamespace(df=df, api=api))


@pytest.mark.parametrize(
    "error",
    [
        APIError("a disk usage operation is already running"),
        DockerException("TLS"),
        requests.exceptions.ReadTimeout("it takes too long"),
    ],
)
def test_what_an_engine_does_not_tell_is_unknown_and_no_none(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSES", (0.0, 0.0))

    def df() -> dict[str, Any]:
        assert client.api.timeout == disk.ANSWER_WITHIN
        raise error

    client = answering(df)
    assert (disk.used(client), disk.cached(client)) == (None, None)
    assert client.api.timeout == 600
    answers = iter([error, {"LayersSize": 12, "BuildCache": [{"ID": "gone", "Shared": False}]}])

    def busy() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    again = answering(busy)
    if isinstance(error, APIError):  # it is asked again
        assert (disk.cached(again) or {}).keys() == {"gone"}
    without = answering(lambda: {"BuildCache": None})
    assert (disk.used(without), disk.cached(without)) == (None, {})
