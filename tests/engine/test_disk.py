"""Layers that BuildKit keeps of removed images, as its records show them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import docker
import pytest
import requests
from docker.errors import APIError, DockerException
from hypothesis import given
from hypothesis import strategies as st

from launcher.engine import disk


class Engine:
    """BuildKit's records; one is let go where nothing lies on it and no image has it."""

    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records
        self.api = SimpleNamespace(prune_builds=self.prune, timeout=600)

    def df(self) -> dict[str, Any]:
        return {"LayersSize": 12, "BuildCache": self.records}

    def prune(self, filters: dict[str, list[str]]) -> None:
        (wanted,) = filters["id"]
        parents = {parent for one in self.records for parent in parents_of(one)}
        if wanted not in parents:
            self.records = [one for one in self.records if one["ID"] != wanted or one["Shared"]]


def parents_of(record: dict[str, Any]) -> list[str]:
    return record.get("Parents") or [record.get("Parent", "")]


def record(name: str, parent: str, image: bool, shared: bool = False) -> dict[str, Any]:
    told = "from local " if image else "fileop target"
    return {"ID": name, "Parent": parent, "Description": told, "Shared": shared, "Size": 5}


def engine(records: list[dict[str, Any]]) -> docker.DockerClient:
    return cast("docker.DockerClient", Engine(records))


def left(client: docker.DockerClient) -> set[str]:
    return {one["ID"] for one in client.df()["BuildCache"]}


def test_a_removed_image_is_let_go_with_what_was_built_on_it_and_nothing_else() -> None:
    client = engine(
        [
            record("copied", "top", image=False),
            record("top", "bottom", image=True),
            record("bottom", "", image=True),
            record("kept", "", image=True, shared=True),
            record("compiled", "kept", image=False),
        ]
    )
    assert disk.held(client) == {"top", "bottom"}
    assert disk.let_go(client, {"top", "bottom"}) == set()
    assert left(client) == {"kept", "compiled"}
    assert disk.cached(client) == 5
    assert disk.used(client) == 12


def test_newer_engines_name_several_parents() -> None:
    base, other = record("base", "", image=True), record("other", "", image=True, shared=True)
    merged = {"ID": "m", "Parents": ["other", "base"], "Description": "merge", "Shared": False}
    client = engine([merged, base, other])
    disk.let_go(client, disk.held(client) or ())
    assert left(client) == {"other"}


@given(st.lists(st.integers(0, 30), max_size=30))
def test_leaves_go_first_whatever_the_tree_is(parents: list[int]) -> None:
    records = [
        record(str(n), str(parent % n) if n else "", image=not n)
        for n, parent in enumerate(parents)
    ]
    client = engine(records)
    disk.let_go(client, disk.held(client) or ())
    assert not left(client)


def test_an_engine_without_such_records_has_none() -> None:
    client = answering(lambda: {"BuildCache": None})
    assert (disk.used(client), disk.held(client)) == (None, set())


def answering(df: Callable[[], dict[str, Any]]) -> docker.DockerClient:
    api = SimpleNamespace(prune_builds=lambda filters: None, timeout=600)
    return cast("docker.DockerClient", SimpleNamespace(df=df, api=api))


@pytest.mark.parametrize(
    "error",
    [
        APIError("a disk usage operation is already running"),
        DockerException("TLS"),
        requests.exceptions.ConnectionError("the engine was restarted"),
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
    assert (disk.used(client), disk.cached(client), disk.held(client)) == (None, None, None)
    assert disk.let_go(client, {"a"}) == {"a"}
    assert client.api.timeout == 600


def test_an_engine_that_is_busy_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PAUSES", (0.0, 0.0))
    busy = iter([True, False])

    def df() -> dict[str, Any]:
        if next(busy):
            raise APIError("a disk usage operation is already running")
        return {"BuildCache": [record("gone", "", image=True)]}

    assert disk.held(answering(df)) == {"gone"}
