"""Locked bases with a real engine and a real registry: what is locked, built, refused."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from launcher.base.screen import Progress
from launcher.base.settings import ROOT, Settings
from launcher.images.builder.image import REPOSITORY, BuildRequest, Builds
from launcher.images.matrix.locked import Lock, LockedImage, LockedPlatform
from launcher.images.matrix.matrix_file import load_lock
from launcher.images.oci import registry as registries
from launcher.images.sources import lock
from tests.e2e.command import built, launched, launcher, refused

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.engine.acquire import BaseNames
    from tests.e2e.registry import Registry

pytestmark = pytest.mark.engine

ROW = "24.10"
TAG = "launchpad-test"  # a row of their own, so that no name of the user's is taken
RELEASE = "0.10.0"
NAMES = "launchpad-test-pinned"


@dataclass(frozen=True)
class Site:
    """A matrix with one row, whose base is in the test's registry, and its lock.

    name: the base's repository; first, second: digests of two images that its tag may name
    """

    engine: DockerClient
    registry: Registry
    folder: Path
    name: str
    builder: str
    settings: Settings
    first: str
    second: str

    @property
    def base(self) -> str:
        return f"{self.name}:1"

    @property
    def env(self) -> dict[str, str]:
        return {"LAUNCHER_MATRIX": str(self.folder / "matrix.yaml")}

    def point(self, digest: str) -> None:
        """Put the registry's tag on one of the two images."""
        engine = self.engine
        engine.api.pull(f"{self.name}@{digest}")
        engine.api.tag(f"{self.name}@{digest}", self.name, "1")
        push(engine, self.name, "1")
        self.forget()

    def forget(self) -> None:
        """Have the engine know none of the two."""
        for digest in (self.first, self.second):
            for reference in (self.base, f"{self.name}@{digest}"):
                remove(self.engine, reference)

    def change(self, **keys: Any) -> None:
        """Write keys of the matrix."""
        path = self.folder / "matrix.yaml"
        path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys, sort_keys=False))

    def locked(self) -> LockedImage:
        """The lock's entry of the base."""
        return load_lock(self.folder / "matrix.lock").images[self.base]

    def lock(self) -> None:
        """Write what the registry's tag names into the lock; the rest of it stays."""
        found = registries.resolve(self.base)
        platform = LockedPlatform(manifest=found.manifest, config=found.config)
        entry = LockedImage(digest=found.digest, platforms={"linux/amd64": platform})
        path = self.folder / "matrix.lock"
        lock.write(load_lock(path).model_copy(update={"images": {self.base: entry}}), path)

    def builds(self) -> Builds:
        return Builds(self.engine, self.settings, Progress(io.StringIO()), NAMES)

    def found(self) -> str:
        """The base that a build would lie on."""
        return self.builds().inputs(self.request()).base.id

    def request(self, base: str | None = None) -> BuildRequest:
        return BuildRequest(TAG, base=base, builder=self.builder)


def push(engine: DockerClient, name: str, tag: str) -> str:
    """The digest of what was pushed, as the registry has it."""
    for event in engine.api.push(name, tag, stream=True, decode=True):
        assert "error" not in event, event
    found = engine.api.inspect_distribution(f"{name}:{tag}")
    return str(found["Descriptor"]["digest"])


def remove(engine: DockerClient, reference: str) -> None:
    from docker.errors import ImageNotFound

    try:
        engine.api.remove_image(reference, force=True)
    except ImageNotFound:
        return


def made(engine: DockerClient, python_image: str, name: str, content: bytes) -> str:
    """A small layer of its own on the base, pushed as NAME:1; its digest."""
    dockerfile = f"FROM {python_image}\nLABEL megatron-launchpad.standin=test\nCOPY extra /extra\n"
    built(engine, dockerfile, f"{name}:1", files={"extra": content})
    return push(engine, name, "1")


def matrix_of(folder: Path, base: str, builder: str) -> None:
    """A matrix of one row and one release, with the lock that there is of it."""
    data = yaml.safe_load((ROOT / "matrix.yaml").read_text())
    row = data["rows"][ROW] | {
        **{"base": base, "python": "3.11", "megatron": RELEASE, "source": "sdist"},
    }
    data |= {
        "builders": {"cp311": builder},
        "moving": [],
        "releases": {RELEASE: data["releases"][RELEASE]},
        "rows": {TAG: row},
    }
    (folder / "matrix.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    whole = load_lock(ROOT / "matrix.lock")
    part = Lock(
        needs={"cp311": whole.needs["cp311"]},
        packages={},
        releases={RELEASE: whole.releases[RELEASE]},
        extensions=whole.extensions,
    )
    lock.write(part, folder / "matrix.lock")
    for name in ("Dockerfile.template", "patches"):
        (folder / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module")
def pushed(
    engine: DockerClient, registry: Registry, python_image: str
) -> Iterator[tuple[str, str, str]]:
    """A repository in the registry, and the digests of two images in it."""
    name = f"{registry.address}/pinned/base"
    second = made(engine, python_image, name, os.urandom(50_000))
    first = made(engine, python_image, name, os.urandom(50_000))
    yield name, first, second
    for tag in (f"{TAG}-{RELEASE}", TAG):
        for names in (NAMES, REPOSITORY):
            remove(engine, f"{names}:{tag}")


@pytest.fixture
def at(
    engine: DockerClient,
    registry: Registry,
    site: Settings,
    bases: BaseNames,
    pushed: tuple[str, str, str],
    tmp_path: Path,
) -> Iterator[Site]:
    """The row locked to the first image, the registry's tag on it, neither in the engine."""
    name, first, second = pushed
    matrix_of(tmp_path, f"{name}:1", bases.builder)
    settings = Settings(
        site.cache, tmp_path / "matrix.yaml", "", "", site.runs, tmp_path / "extras"
    )
    found = Site(engine, registry, tmp_path, name, bases.builder, settings, first, second)
    found.point(first)
    found.lock()
    yield found
    found.forget()


def test_matrix_lock_keeps_what_it_wrote_of_a_tag_and_upgrades_it_when_asked(at: Site) -> None:
    path = at.folder / "matrix.lock"
    lock.write(load_lock(path).model_copy(update={"images": {}}), path)
    done = launched("matrix", "lock", **at.env)
    assert "builder of cp311 has no pin" in done.stderr  # a stand-in is in no registry
    at.engine.api.pull(at.base)
    assert at.locked().digest == at.first
    platform = at.locked().platforms["linux/amd64"]
    assert platform.manifest == at.first
    assert platform.config == at.engine.api.inspect_image(at.base)["Id"]
    before = path.read_bytes()
    at.point(at.second)  # what is locked stays, wherever the tag is
    launched("matrix", "lock", **at.env)
    assert path.read_bytes() == before
    launched("matrix", "lock", "--upgrade", at.base, **at.env)
    assert at.locked().digest == at.second


def test_the_locked_base_is_pulled_by_digest_and_then_needed_from_nowhere(
    at: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = at.builds().build(at.request())
    labels = at.engine.api.inspect_image(built.id)["Config"]["Labels"]
    assert labels["org.opencontainers.image.base.digest"] == at.first
    assert labels["org.opencontainers.image.base.name"] == at.base
    assert at.engine.api.inspect_image(at.base)["Id"] == at.locked().platforms["linux/amd64"].config

    def network(*_: object, **__: object) -> None:
        raise AssertionError("a registry was asked")

    monkeypatch.setattr(registries, "resolve", network)
    builds = at.builds()
    for name in ("pull", "inspect_distribution"):
        monkeypatch.setattr(builds.client.api, name, network)
    found = builds.inputs(BuildRequest(TAG, builder=at.builder))
    assert found.base.id == at.locked().platforms["linux/amd64"].config


def test_a_tag_that_was_pointed_elsewhere_is_refused_with_both_digests(at: Site) -> None:
    arguments = ("image", "build", TAG, "--builder", at.builder)
    at.point(at.second)
    of_registry = launcher(*arguments, **at.env)
    refused(of_registry, 122, "isn't the locked image", at.first, at.second, "registry:")
    at.engine.api.pull(at.base)
    of_engine = launcher(*arguments, **at.env)
    refused(of_engine, 122, "isn't the locked image", at.first, at.second, "engine:")
    assert "make lock" in of_engine.stderr


@pytest.mark.long
def test_of_a_moving_tag_the_locked_image_is_built_wherever_the_tag_is(at: Site) -> None:
    at.point(at.second)
    at.engine.api.pull(at.base)
    other = at.engine.api.inspect_image(at.base)["Id"]
    at.change(moving=[at.base])
    assert at.found() == at.locked().platforms["linux/amd64"].config
    assert at.engine.api.inspect_image(at.base)["Id"] == other


@pytest.mark.long
def test_a_copy_that_was_loaded_from_a_file_is_the_locked_image(at: Site) -> None:
    at.engine.api.pull(at.base)
    saved = b"".join(at.engine.api.get_image(at.base))
    at.forget()
    at.engine.api.load_image(saved)
    assert at.engine.api.inspect_image(at.base)["RepoDigests"] == []
    assert at.found() == at.locked().platforms["linux/amd64"].config
    at.point(at.second)
    at.engine.api.load_image(saved)
    assert at.found() == at.locked().platforms["linux/amd64"].config


def test_a_mirror_gives_the_locked_image_and_no_other(
    at: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = "upstream.invalid/team/base:1"
    at.change(
        rows={
            TAG: yaml.safe_load((at.folder / "matrix.yaml").read_text())["rows"][TAG]
            | {"base": reference}
        }
    )
    mirror = f"upstream.invalid/team={at.name.rpartition('/')[0]}"
    env = {**at.env, "LAUNCHER_IMAGE_MIRRORS": mirror}
    launched("matrix", "lock", **env)
    locked = load_lock(at.folder / "matrix.lock").images
    assert {name: image.digest for name, image in locked.items()} == {reference: at.first}
    done = launched("image", "build", TAG, "--builder", at.builder, **env)
    assert f"UNPINNED {reference}" not in done.stderr
    assert at.engine.api.inspect_image(reference)["RepoDigests"] == [f"{at.name}@{at.first}"]
    remove(at.engine, reference)
    at.point(at.second)
    refused(
        launcher("image", "build", TAG, "--builder", at.builder, **env), 122, at.first, at.second
    )


@pytest.mark.parametrize(
    "kind",
    ["layer", *(pytest.param(one, marks=pytest.mark.long) for one in ("config", "manifest"))],
)
def test_a_byte_changed_at_the_registry_is_refused_and_nothing_is_built(
    at: Site, python_image: str, kind: str
) -> None:
    digest = made(at.engine, python_image, at.name, os.urandom(50_000))
    at.lock()
    remove(at.engine, at.base)
    remove(at.engine, f"{at.name}@{digest}")
    manifest = json.loads(at.registry.blob(digest).read_bytes())
    blob = at.registry.blob(
        {
            "manifest": digest,
            "config": manifest["config"]["digest"],
            "layer": manifest["layers"][-1]["digest"],
        }[kind]
    )
    whole = blob.read_bytes()
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 0x01
    built = at.engine.api.images(NAMES)
    blob.write_bytes(changed)
    done = launcher("image", "build", TAG, "--builder", at.builder, **at.env)
    refused(done, 125, at.name, "other bytes came than the digest says")
    assert at.engine.api.images(NAMES) == built
    assert not at.engine.api.images(at.name)
    blob.write_bytes(whole)
    assert at.found() == manifest["config"]["digest"]
    remove(at.engine, at.base)
    remove(at.engine, f"{at.name}@{digest}")
