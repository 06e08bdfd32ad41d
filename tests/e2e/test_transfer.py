"""Images carried by folder and by registry, between two real engines; and what builds them.

A bundle of real inputs: where neither an index nor a registry is in reach, the same image.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.settings import Settings
from launcher.images.builder.beside import PACKAGES, PROVENANCE, SBOM
from launcher.images.engine.connect import engine_host
from launcher.images.oci.archive import archive, load_archive
from tests.e2e.command import launched, launcher, random_file, refused
from tests.e2e.conftest import Small
from tests.e2e.registry import Registry, serving

if TYPE_CHECKING:
    from docker import DockerClient

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

BASE, IMAGE = "launchpad-test-carried:base", "launchpad-test-carried:1"


@pytest.fixture(scope="module")
def image(engine: DockerClient) -> Iterator[str]:
    """A base of one layer, and an image with two more, of which one is 12 MB that don't pack."""
    engine.api.import_image_from_data(random_file("base", 3_000_000), *BASE.split(":"))
    previous = BASE
    for name, size in (("packages", 12_000_000), ("megatron", 50_000)):
        container = engine.containers.create(previous, ["none"])
        container.put_archive("/", random_file(name, size))
        previous = container.commit(*IMAGE.split(":")).id
        container.remove()
    yield IMAGE
    for name in (IMAGE, BASE):
        engine.images.remove(name, force=True)


def on(engine: DockerClient, *args: str) -> subprocess.CompletedProcess[str]:
    """The launcher on one of the engines."""
    return launcher(*args, DOCKER_HOST=engine_host(engine))


def done(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def carry_base(engine: DockerClient, elsewhere: DockerClient) -> None:
    """What another site has when it has the base alone."""
    list(elsewhere.api.load_image(engine.api.get_image(BASE)))


def test_an_image_goes_to_another_engine_by_folder(
    engine: DockerClient, elsewhere: DockerClient, image: str, tmp_path: Path
) -> None:
    folder = str(tmp_path / "stick")
    said = done(on(engine, "image", "save", image, "-o", folder))
    assert subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=folder).returncode == 0
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", folder, str(copy)], check=True)
    assert f"{image} {_id(engine, image)[7:19]} loaded" in done(
        on(elsewhere, "image", "load", "--all-tags", str(copy))
    )
    assert _id(elsewhere, image) == _id(engine, image)
    assert json.loads((copy / "transfer.json").read_text())["manifest"] in said


def test_thin_is_refused_without_the_base_and_loaded_with_it(
    engine: DockerClient, elsewhere: DockerClient, image: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    done(on(engine, "image", "save", image, "--thin", "--base", BASE, "-o", folder))
    refused(on(elsewhere, "image", "load", "--all-tags", folder), 125, BASE, f"docker pull {BASE}")
    assert not elsewhere.images.list(all=True)
    carry_base(engine, elsewhere)
    done(on(elsewhere, "image", "load", "--all-tags", folder))
    assert _id(elsewhere, image) == _id(engine, image)


def test_thin_is_loaded_onto_a_base_that_was_pulled_packed(
    engine: DockerClient,
    elsewhere: DockerClient,
    registry: Registry,
    site: Settings,
    image: str,
    tmp_path: Path,
) -> None:
    """Through a registry, which has layers packed, and gives them so."""
    folder = str(tmp_path / "thin")
    done(on(engine, "image", "save", image, "--thin", "--base", BASE, "-o", folder))
    pushed = done(on(engine, "image", "push", BASE, "--registry", registry.address)).split()
    name, digest = pushed[-2:]
    assert name.partition("/")[2].startswith("launchpad-test-carried:")
    with ExitStack() as stack:
        near = tmp_path / "near"
        near.mkdir()
        (near / "data").symlink_to(registry.data)
        served = stack.enter_context(serving(site.cache, near, engine_host(elsewhere)))
        here = f"{served.address}/{BASE}"
        wrong = on(elsewhere, "image", "pull", here, "--digest", _id(engine, image))
        refused(wrong, 1, "isn't the expected image", digest, _id(engine, image))
        assert not elsewhere.images.list(all=True)
        assert digest in done(on(elsewhere, "image", "pull", here, "--digest", digest))
    done(on(elsewhere, "image", "load", "--all-tags", folder))
    assert _id(elsewhere, image) == _id(engine, image)
    engine.images.remove(name)


@pytest.mark.long
def test_the_cpu_image_is_under_3_percent_thin(
    engine: DockerClient, elsewhere: DockerClient, cpu_images: CpuImages, tmp_path: Path
) -> None:
    """It goes to an engine that has another image of the row: torch and all but our layer."""
    name, older = cpu_images.build(), "launchpad-test-older:cpu"
    full, thin = tmp_path / "full", tmp_path / "thin"
    done(on(engine, "image", "save", name, "-o", str(full)))
    done(on(engine, "image", "save", name, "--thin", "-o", str(thin)))
    assert size_of(thin) < 0.03 * size_of(full)
    assert {path.name for path in (thin / "documents").iterdir()} == {
        PACKAGES,
        PROVENANCE,
        SBOM,
    }
    refused(
        on(elsewhere, "image", "load", "--all-tags", str(thin)),
        125,
        name,
        "Save it without --thin",
    )
    done(on(elsewhere, "image", "load", "--all-tags", str(full)))
    _without_top_layer(elsewhere, full, older)
    elsewhere.images.remove(name, force=True)
    loaded = done(on(elsewhere, "image", "load", "--all-tags", str(thin)))
    assert _id(engine, name)[7:19] in loaded


def _without_top_layer(engine: DockerClient, folder: Path, name: str) -> None:
    """Make an image of all but the last layer of the one saved in `folder`."""
    listing = json.loads((folder / "transfer.json").read_text())
    config = json.loads((folder / "blobs/sha256" / listing["image"][7:]).read_bytes())
    config["rootfs"]["diff_ids"].pop()
    config["history"] = []
    config["config"]["Labels"] = {}
    text = json.dumps(config).encode()
    layers = [f"{one[7:]}/layer.tar" for one in config["rootfs"]["diff_ids"]]
    load_archive(engine, archive(text, layers))
    engine.api.tag(f"sha256:{hashlib.sha256(text).hexdigest()}", *name.split(":"))


def _id(engine: DockerClient, image: str) -> str:
    found: str = engine.api.inspect_image(image)["Id"]
    return found


NOWHERE = {
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_NO_INDEX": "1",
    "LAUNCHER_TORCH_INDEX": "",
    "LAUNCHER_GIT_MIRROR": "file:///nowhere/",
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
}
"""What lets nothing be fetched: no index, no mirror, a proxy that isn't there."""


@pytest.fixture(scope="module")
def packed(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small row's inputs, images and all."""
    path = tmp_path_factory.mktemp("bundle") / "small"
    done = launched("fetch", "24.10", *small.instead, "--bundle", str(path), **small.env)
    assert f"{path} " in done.stdout
    return path


def offline(cache: Path, client: DockerClient) -> dict[str, str]:
    return NOWHERE | {"LAUNCHER_CACHE": str(cache), "DOCKER_HOST": engine_host(client)}


def test_the_same_image_is_built_where_nothing_can_be_fetched(
    engine: DockerClient, elsewhere: DockerClient, small: Small, packed: Path, tmp_path: Path
) -> None:
    here = engine.api.inspect_image(small.id)
    environment = offline(tmp_path / "cache", elsewhere) | small.env
    done = launcher("image", "build", "24.10", *small.instead, **environment)
    refused(done, 122 if "no index" in done.stderr else 125)  # neither package nor base is there

    taken = launched("fetch", "--from", str(packed), **environment)
    assert taken.stdout.startswith("24.10: ")
    built = launched("image", "build", "24.10", *small.instead, **environment)
    assert " built" in built.stdout

    there = elsewhere.api.inspect_image("megatron:24.10")
    for part in ("Config", "RootFS", "Architecture", "Os"):
        assert there[part] == here[part]
    if there["Created"] == here["Created"]:  # Docker 20.10 writes the time of the build there
        assert there["Id"] == here["Id"]


def test_a_row_from_git_is_carried_with_its_source(
    engine: DockerClient, site: Settings, tmp_path: Path
) -> None:
    at = os.environ.get("MEGATRON_CHECKOUT")
    if not at:
        pytest.skip("MEGATRON_CHECKOUT names no Megatron-LM repository to take a release from")
    mirror = tmp_path / "mirror/NVIDIA"
    mirror.mkdir(parents=True)
    (mirror / "Megatron-LM.git").symlink_to(Path(at).resolve())
    path = tmp_path / "git"
    row = ["fetch", "24.10", "--no-images"]
    file = tmp_path / "settings.yaml"
    file.write_text(f"git_mirror: file://{mirror.parent}\n")
    environment = {"LAUNCHER_CACHE": str(tmp_path / "first"), "LAUNCHER_SETTINGS": str(file)}
    (tmp_path / "first").mkdir()
    (tmp_path / "first/sha256").symlink_to(site.cache / "sha256")
    launched(*row, "--bundle", str(path), **environment)
    there = offline(tmp_path / "second", engine)
    refused(launcher(*row, **there), 122)
    taken = launched("fetch", "--from", str(path), **there)
    assert "1 git sources" in taken.stdout
    launched(*row, **there)
