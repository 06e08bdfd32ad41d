"""Images pushed to a registry and pulled from it, and what is said where that fails."""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError

from launcher.base.errors import EngineError, UsageError
from launcher.base.screen import Progress
from launcher.cli.transfer import pull as pull_command
from launcher.images.carry import image_lookup, remote
from launcher.images.matrix.locked import LockedImage, LockedPlatform
from launcher.images.oci.registry import ImageDigests
from tests.tables import table

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
    """Of arm64. Pushes and pulls what it is told to; the registry has `there` under every name.

    asks: it can ask registries for a digest, which Podman can't
    """

    def __init__(self, events: list[dict[str, Any]], there: str, asks: bool = True) -> None:
        self.there, self.events = there, events
        self.tags: list[tuple[str, str]] = []
        self.pulled: list[tuple[str, str]] = []
        self.api = SimpleNamespace(
            tag=lambda image, repository, tag: self.tags.append((repository, tag)),
            push=lambda *args, **more: iter(self.events),
            pull=self._pull,
            inspect_distribution=self._ask,
            inspect_image=lambda name: {"Id": C, "Os": "linux", "Architecture": "arm64"},
            timeout=300,
        )
        self.asks = asks

    def version(self) -> dict[str, str]:
        return {"Os": "linux", "Arch": "arm64"}

    def _ask(self, name: str) -> dict[str, Any]:
        if not self.asks:
            raise APIError("x", explanation="dial tcp: connection refused")
        return {"Descriptor": {"digest": self.there}}

    def _pull(self, repository: str, tag: str, **more: object) -> Iterator[dict[str, Any]]:
        self.pulled.append((repository, tag))
        return iter(self.events)


class Registry:
    """What is asked of it: each name, and the platform. It has A, for arm64 alone, or nothing."""

    def __init__(self, empty: bool = False) -> None:
        self.empty = empty
        self.asked: list[tuple[str, str]] = []

    def resolve(self, reference: str, platform: str = "linux/amd64") -> ImageDigests:
        self.asked.append((reference, platform))
        if self.empty or platform != "linux/arm64":
            raise EngineError("nothing here")
        return ImageDigests(A, B, C)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry, where it is asked directly."""
    asked = Registry()
    monkeypatch.setattr("launcher.images.oci.registry.resolve", asked.resolve)
    return asked


def test_a_push_after_which_the_registry_has_another_image_is_told_with_both_digests() -> None:
    with pytest.raises(remote.OtherImageError) as caught:
        remote.push(Engine(PUSHED, B), C, NAME, Progress(io.StringIO()))
    assert A in str(caught.value)
    assert B in str(caught.value)


def test_what_an_engine_cannot_ask_is_asked_of_the_registry(registry: Registry) -> None:
    podman = Engine([], A, asks=False)
    assert remote.push(podman, C, NAME, Progress(io.StringIO())).digest == A
    assert remote.pull(podman, NAME, Progress(io.StringIO()), [A]).digest == A
    assert registry.asked == 2 * [(NAME, "linux/arm64")]


@pytest.mark.parametrize("expected", [A, B, C])
def test_a_pull_takes_any_digest_that_the_image_is_known_by(
    registry: Registry, expected: str
) -> None:
    """What is compared is what is pulled: that digest, wherever the tag is by now."""
    engine = Engine([], A)
    pulled = remote.pull(engine, NAME, Progress(io.StringIO()), [expected], "megatron:24.10")
    assert pulled == remote.RemoteCopy(NAME, A, C)
    assert engine.pulled == [("registry.example:5000/team/megatron", A)]
    assert engine.tags == [("registry.example:5000/team/megatron", "24.10"), ("megatron", "24.10")]
    by_digest = (f"registry.example:5000/team/megatron@{A}", "linux/arm64")
    assert registry.asked == ([] if expected == A else [by_digest])


@pytest.mark.parametrize("move", [partial(remote.push, image=C, remote=NAME), None])
@table("events", "asks", "said")
def test_what_engine_or_registry_refuse_is_told_and_a_pull_names_nothing(
    registry: Registry, move: Any, events: list[dict[str, Any]], asks: bool, said: str
) -> None:
    registry.empty, engine = True, Engine(events, A, asks)
    with pytest.raises(EngineError) as caught:
        (move or partial(remote.pull, remote=NAME))(client=engine, progress=Progress(io.StringIO()))
    assert said in str(caught.value)
    assert move or not engine.tags


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("prefix", [None, "registry.example/team"])
def test_a_locked_image_comes_from_its_mirror_or_from_the_registry_that_is_named(
    monkeypatch: pytest.MonkeyPatch, moves: bool, prefix: str | None
) -> None:
    name = "nvcr.io/nvidia/pytorch:24.10-py3"
    locked = LockedImage(digest=C, platforms={"linux/amd64": LockedPlatform(manifest=B, config=A)})
    matrix = SimpleNamespace(rows={}, moving=[name] if moves else [])
    asked: list[tuple[str, list[str], str | None]] = []

    def pull(
        client: object, there: str, progress: Progress, expected: Sequence[str], own: str | None
    ) -> remote.RemoteCopy:
        asked.append((there, list(expected), own))
        return remote.RemoteCopy(there, A, C)

    monkeypatch.setattr("launcher.images.matrix.matrix_file.load_matrix", lambda: matrix)
    monkeypatch.setattr(
        "launcher.images.matrix.matrix_file.load_lock",
        lambda path: SimpleNamespace(images={name: locked}),
    )
    monkeypatch.setattr("launcher.images.engine.connect.connect", lambda timeout: None)
    monkeypatch.setattr(remote, "pull", pull)
    monkeypatch.setenv("LAUNCHER_IMAGE_MIRRORS", "nvcr.io=mirror.example/nvcr")
    pull_command(Namespace(image=name, registry=prefix, digest=None))
    mirror = "mirror.example/nvcr/nvidia/pytorch"
    by_default = f"{mirror}@{C}" if moves else f"{mirror}:24.10-py3"
    assert asked == [(f"{prefix}/{name}" if prefix else by_default, [C, A, B], name)]


@table("name", "prefix", "there")
def test_a_name_at_a_registry(name: str, prefix: str | None, there: str | None) -> None:
    with nullcontext() if there else pytest.raises(UsageError, match="names no registry"):
        assert remote.remote_name(name, prefix) == there
    assert image_lookup.digest("a" * 64) == image_lookup.digest(A) == A
    with pytest.raises(UsageError, match="isn't a digest"):
        image_lookup.digest("sha256:12")
