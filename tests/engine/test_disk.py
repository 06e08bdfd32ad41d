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


class Engine:
    """BuildKit's records; one goes where nothing lies on it and no image has it."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.api = SimpleNamespace(prune_builds=self.prune, timeout=600)

    def df(self) -> dict[str, Any]:
        return {"LayersSize": 12, "BuildCache": self.records}

    def prune(self, filters: dict[str, list[str]]) -> None:
        (wanted,) = filters["id"]
        if wanted not in {one["Parent"] for one in self.records}:
            self.records = [one for one in self.records if one["ID"] != wanted or one["Shared"]]


def record(name: str, parent: str, at: int, shared: bool = False) -> dict[str, Any]:
    return {
        "ID": name,
        "Parent": parent,
        "Shared": shared,
        "Size": 5,
        "CreatedAt": f"2026-01-0{at}",
    }


def test_what_came_since_is_forgotten_with_what_was_built_on_it_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "PAUSES", (0.0, 0.0, 0.0))
    old = [record("kept", "", 1, shared=True), record("compiled", "kept", 2)]
    engine = Engine(old)
    client = cast("docker.DockerClient", engine)
    before = disk.cached(client) or {}
    assert (before.keys(), disk.used(client)) == ({"compiled"}, 12)
    # `copied` lies on what is newer, by a clock that was set: it takes a second try.
    new = [record("bottom", "", 3), record("top", "bottom", 4), record("copied", "top", 3)]
    engine.records = [*old, *new]
    assert disk.forget(client, before)
    assert engine.records == old
    engine.prune = lambda filters: None  # type: ignore[method-assign]
    engine.api.prune_builds = engine.prune
    engine.records = [*old, *new]
    assert not disk.forget(client, before)


def answering(df: Callable[[], dict[str, Any]]) -> docker.DockerClient:
    api = SimpleNamespace(prune_builds=lambda filters: None, timeout=600)
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
    assert not disk.forget(client, {})
    assert client.api.timeout == 600
    answers = iter([error, {"BuildCache": [record("gone", "", 1)]}])

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
