"""Which image a build starts from, by what the engine and the registry have and the lock says."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from docker.errors import APIError, ImageNotFound, NotFound

from launcher.build import pins
from launcher.errors import EngineError, LauncherError, UsageError
from launcher.matrix.schema import LockedImage, LockedPlatform
from launcher.oci import registry
from launcher.oci.registry import Resolved
from launcher.screen import Progress
from launcher.settings import Settings
from launcher.trials.cell import Stages

BASE = "nvcr.io/nvidia/pytorch:24.10-py3"
REPOSITORY = "nvcr.io/nvidia/pytorch"


def sha(letter: str) -> str:
    return f"sha256:{letter * 64}"


INDEX, MANIFEST, CONFIG, OTHER = sha("a"), sha("b"), sha("c"), sha("d")
LOCKED = LockedImage(
    digest=INDEX, platforms={"linux/amd64": LockedPlatform(manifest=MANIFEST, config=CONFIG)}
)


@dataclass
class Engine:
    """An engine's images by ID, and the registry that it pulls from: digests by name."""

    images: dict[str, dict[str, Any]] = field(default_factory=dict)
    registry: dict[str, str] = field(default_factory=dict)
    pulled: list[str] = field(default_factory=list)
    timeout: int = 60

    def has(self, id: str, *tags: str, digests: tuple[str, ...] = ()) -> Engine:
        self.images[id] = {"Id": id, "RepoTags": [*tags], "RepoDigests": [*digests]}
        return self

    def inspect_image(self, name: str) -> dict[str, Any]:
        if " " in name:
            raise APIError("invalid reference format", explanation="invalid reference format")
        for image in self.images.values():
            if name in (image["Id"], *image["RepoTags"], *image["RepoDigests"]):
                return image
        raise ImageNotFound(name)

    def inspect_distribution(self, name: str) -> dict[str, Any]:
        if name not in self.registry:
            raise NotFound("404", explanation="manifest unknown")
        return {"Descriptor": {"digest": self.registry[name]}}

    def pull(self, name: str, stream: bool, decode: bool) -> list[dict[str, str]]:
        self.pulled.append(name)
        repository, _, digest = name.partition("@")
        if not digest and name in self.registry:
            digest = self.registry[name]
            self.has(OTHER, name, digests=(f"{repository.rpartition(':')[0]}@{digest}",))
        elif digest in self.registry.values():
            self.has(CONFIG if digest == INDEX else OTHER, digests=(name,))
        else:
            return [{"error": "manifest unknown"}]
        return [{"status": "Pull complete"}]

    def tag(self, id: str, repository: str, tag: str) -> None:
        for image in self.images.values():
            image["RepoTags"] = [n for n in image["RepoTags"] if n != f"{repository}:{tag}"]
        self.images[id]["RepoTags"].append(f"{repository}:{tag}")


@dataclass
class Found:
    """What a search gave and said."""

    image: pins.StartImage
    said: str


def shown(image: pins.StartImage) -> tuple[str, str]:
    return image.name, image.id


def find(
    engine: Engine,
    site: Settings,
    chosen: str | None = None,
    locked: LockedImage | None = LOCKED,
    moving: bool = False,
    reference: str = BASE,
) -> Found:
    out = io.StringIO()
    images = pins.Images(
        SimpleNamespace(api=engine),
        site,
        Progress(out),
        {reference: locked} if locked else {},
        [reference] if moving else [],
    )
    first = images.find(reference, chosen)
    pulled = len(engine.pulled)
    assert images.find(reference, chosen) == first
    assert len(engine.pulled) == pulled
    return Found(first, out.getvalue())


@pytest.fixture(autouse=True)
def _no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(reference: str) -> Resolved:
        raise EngineError("nobody there")

    monkeypatch.setattr(registry, "resolve", resolve)


@pytest.mark.parametrize("id", [INDEX, MANIFEST, CONFIG])
def test_the_locked_image_in_the_engine_is_used_as_it_is(empty_site: Settings, id: str) -> None:
    """Loaded from a file: no digest. An ID is the configuration's, or containerd's store's."""
    engine = Engine().has(id, BASE)
    found = find(engine, empty_site)
    assert shown(found.image) == (BASE, id)
    assert not engine.pulled
    assert found.said == ""
    digests = (f"mirror/x@{sha('e')}", f"{REPOSITORY}@{INDEX}")  # one that was pulled is named so
    pulled = find(Engine().has(OTHER, BASE, digests=digests), empty_site)
    assert shown(pulled.image) == (f"{REPOSITORY}@{INDEX}", OTHER)


def test_a_moving_tag_s_image_loaded_without_a_name_gets_one(empty_site: Settings) -> None:
    engine = Engine().has(CONFIG).has(OTHER, BASE)
    found = find(engine, empty_site, moving=True)
    assert shown(found.image) == (f"{REPOSITORY}:locked-cccccccccccc", CONFIG)
    assert engine.inspect_image(found.image.name)["Id"] == CONFIG


def test_an_image_that_nobody_has_is_told_as_a_pull_s_failure(empty_site: Settings) -> None:
    for locked in (LOCKED, None):
        with pytest.raises(EngineError, match=r"no such image \(404\)"):
            find(Engine(), empty_site, locked=locked)
    with pytest.raises(UsageError, match="Foo Bar: not an image's name"):
        find(Engine(), empty_site, chosen="Foo Bar")


def test_without_a_lock_the_tag_decides_and_that_is_told(empty_site: Settings) -> None:
    for engine in (Engine().has(OTHER, BASE), Engine(registry={BASE: OTHER})):
        found = find(engine, empty_site, locked=None)
        assert shown(found.image) == (BASE, OTHER)
        assert f"UNPINNED {BASE}: matrix.lock has no digest of it" in found.said
        assert found.said.count("UNPINNED") == 1
        assert OTHER in found.said
        assert "make lock" in found.said


def test_a_name_with_a_digest_in_it_is_pinned_by_itself(empty_site: Settings) -> None:
    reference = f"{REPOSITORY}@{INDEX}"
    engine = Engine(registry={BASE: INDEX})
    found = find(engine, empty_site, locked=None, reference=reference)
    assert shown(found.image) == (reference, CONFIG)
    assert "UNPINNED" not in found.said


def test_a_user_s_own_choice_is_taken_and_told_unless_it_is_the_locked_image(
    empty_site: Settings,
) -> None:
    engine = Engine().has(OTHER, "own:1")
    found = find(engine, empty_site, chosen="own:1")
    assert found.image == pins.StartImage("own:1", OTHER, "own:1", OTHER, pinned=False)
    assert "UNPINNED own:1: not the locked image" in found.said
    engine = Engine().has(OTHER, "mirror/x:1", digests=(f"mirror/x@{INDEX}",))
    found = find(engine, empty_site, chosen="mirror/x:1")
    assert found.image == pins.StartImage(f"mirror/x@{INDEX}", OTHER, BASE, INDEX, pinned=True)
    assert found.said == ""


@pytest.mark.parametrize(
    ("engine", "chosen"),
    [(Engine().has(OTHER, BASE), None), (Engine(), None), (Engine(), "Foo Bar")],
    ids=["moved", "unreachable", "no-name"],
)
def test_an_image_that_is_not_found_is_none_of_the_source_s_faults(
    empty_site: Settings, engine: Engine, chosen: str | None
) -> None:
    """A build has resolved its source by then, and `matrix compat` tells the stage that fails."""
    progress = Stages(lambda told: None, io.StringIO())
    progress.step("source: Megatron 0.9.0 from git")
    assert progress.stage == "fetch"
    images = pins.Images(SimpleNamespace(api=engine), empty_site, progress, {BASE: LOCKED}, [])
    with pytest.raises(LauncherError):
        images.find(BASE, chosen)
    assert progress.stage == "pull"
