"""Registries: names there, what is shown of layers, and digests that must agree."""

from __future__ import annotations

import io
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from launcher.engine.registry import Resolved
from launcher.errors import EngineError, UsageError
from launcher.progress import Progress
from launcher.transfer import images, remote

A, B, C = (f"sha256:{letter * 64}" for letter in "abc")
NAME = "registry.example:5000/team/megatron:24.10"
PUSHED = [
    {"status": "The push refers to repository [x]"},
    {"status": "Preparing", "id": "111111111111"},
    {"status": "Pushing", "id": "111111111111", "progressDetail": {"current": 5, "total": 2000000}},
    {"status": "Pushing", "id": "111111111111", "progressDetail": {"current": 2500000}},
    {"status": "Layer already exists", "id": "222222222222"},
    {"status": "Pushed", "id": "111111111111"},
    {"status": f"24.10: digest: {A} size: 1"},
    {"aux": {"Tag": "24.10", "Digest": A, "Size": 1}},
]


class Engine:
    """Pushes and pulls what it is told to; the registry has `there` under every name."""

    def __init__(self, events: list[dict[str, Any]], there: str) -> None:
        self.there, self.events = there, events
        self.tags: list[tuple[str, str]] = []
        self.pulled: list[tuple[str, str]] = []
        self.api = SimpleNamespace(
            tag=lambda image, repository, tag: self.tags.append((repository, tag)),
            push=lambda *args, **more: iter(self.events),
            pull=self._pull,
            inspect_distribution=lambda name: {"Descriptor": {"digest": self.there}},
            inspect_image=lambda name: {"Id": C},
        )

    def _pull(self, repository: str, tag: str, **more: object) -> Iterator[dict[str, Any]]:
        self.pulled.append((repository, tag))
        return iter(self.events)


def test_a_push_tells_each_layer_and_the_registrys_digest() -> None:
    shown = io.StringIO()
    engine = Engine(PUSHED, A)
    assert remote.push(engine, C, NAME, Progress(shown)) == remote.Carried(NAME, A, C)
    assert engine.tags == [("registry.example:5000/team/megatron", "24.10")]
    first, second, third = shown.getvalue().splitlines()
    assert first == "  222222222222: layer already exists"
    assert second == "  111111111111: pushed, 2.5 MB"
    assert third.startswith(f"push {NAME} (")


def test_a_push_after_which_the_registry_has_another_image_is_told_with_both_digests() -> None:
    with pytest.raises(remote.OtherImageError) as caught:
        remote.push(Engine(PUSHED, B), C, NAME, Progress(io.StringIO()))
    assert A in str(caught.value)
    assert B in str(caught.value)


def test_a_push_that_is_refused_is_told() -> None:
    engine = Engine([{"error": "denied: requested access to the resource is denied"}], A)
    with pytest.raises(EngineError, match="refuses access") as caught:
        remote.push(engine, C, NAME, Progress(io.StringIO()))
    assert "docker login registry.example:5000" in caught.value.remedy


def test_a_pull_is_by_the_registrys_digest_and_named_at_the_end() -> None:
    engine = Engine([{"status": "Pull complete", "id": "111111111111"}], A)
    pulled = remote.pull(engine, NAME, Progress(io.StringIO()), {A}, "megatron:24.10")
    assert pulled == remote.Carried(NAME, A, C)
    assert engine.pulled == [("registry.example:5000/team/megatron", A)]
    assert engine.tags == [("registry.example:5000/team/megatron", "24.10"), ("megatron", "24.10")]


@pytest.mark.parametrize("expected", [A, B, C])
def test_a_pull_takes_any_digest_that_the_image_is_known_by(
    monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    monkeypatch.setattr("launcher.engine.registry.resolve", lambda name: Resolved(A, B, C))
    assert remote.pull(Engine([], A), NAME, Progress(io.StringIO()), {expected}).digest == A


def test_a_pull_of_another_image_is_refused_before_any_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("launcher.engine.registry.resolve", lambda name: Resolved(A, B, C))
    engine, other = Engine([], A), f"sha256:{'d' * 64}"
    with pytest.raises(remote.OtherImageError, match="nothing was pulled") as caught:
        remote.pull(engine, NAME, Progress(io.StringIO()), {other})
    assert A in str(caught.value)
    assert other in str(caught.value)
    assert not engine.pulled
    assert not engine.tags


def test_a_pull_that_fails_moves_no_name() -> None:
    engine = Engine([{"error": "filesystem layer verification failed for digest"}], A)
    with pytest.raises(EngineError, match="layer verification failed"):
        remote.pull(engine, NAME, Progress(io.StringIO()))
    assert not engine.tags


def test_a_registry_that_cannot_be_asked_is_told() -> None:
    engine = Engine([], A)

    def fails(name: str) -> None:
        raise APIError("x", explanation="dial tcp: connection refused")

    engine.api.inspect_distribution = fails
    with pytest.raises(EngineError, match="can't be reached"):
        remote.pull(engine, NAME, Progress(io.StringIO()))


@pytest.mark.parametrize(
    ("name", "prefix", "there"),
    [
        ("megatron:24.10", "registry.example/team/", "registry.example/team/megatron:24.10"),
        ("registry.example/x:1", None, "registry.example/x:1"),
        ("localhost/x:1", None, "localhost/x:1"),
    ],
)
def test_a_name_at_a_registry(name: str, prefix: str | None, there: str) -> None:
    assert remote.remote_name(name, prefix) == there


@pytest.mark.parametrize("name", ["megatron:24.10", "team/megatron:24.10"])
def test_docker_hub_is_never_meant_by_default(name: str) -> None:
    with pytest.raises(UsageError, match="names no registry"):
        remote.remote_name(name, None)


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("host:5000/a", ("host:5000/a", "latest")),
        ("host:5000/a:1", ("host:5000/a", "1")),
        (f"host/a@{A}", ("host/a", A)),
    ],
)
def test_a_reference_has_a_repository_and_a_tag(reference: str, parts: tuple[str, str]) -> None:
    assert remote.split(reference) == parts


def test_what_is_no_digest_is_refused() -> None:
    assert images.digest("a" * 64) == images.digest(A) == A
    with pytest.raises(UsageError, match="isn't a digest"):
        images.digest("sha256:12")
