"""A real build, the documents beside it, and what inspect and scan read back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from launcher.build import beside
from launcher.matrix.load import load_lock, load_matrix
from launcher.settings import ROOT, Settings
from tests.build.test_attest import validated
from tests.conftest import NAMES
from tests.e2e.command import launcher, refused
from tests.images.osv import Osv, record, serving

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.engine.acquire import Bases
    from tests.conftest import CpuImages
    from tests.registry import Registry

pytestmark = pytest.mark.engine

OCI = "org.opencontainers.image."
# Builds the cpu row from the clone that it runs in; prints which that is, and whether it was there.
BUILD = """
import sys
import launcher.settings as settings
from launcher.build.image import Builds, Request
from launcher.engine.connect import connect
from launcher.progress import Progress
base, builder, names = sys.argv[1:]
builds = Builds(connect(timeout=600), settings.settings(), Progress(), names)
print(settings.ROOT, builds.build(Request("cpu", base=base, builder=builder)).reused)
"""


def inspected(name: str, **env: str) -> dict[str, Any]:
    """What `image inspect --json` prints."""
    done = launcher("image", "inspect", name, "--json", **env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_image_is_documented_and_inspect_reads_it_back(
    engine: DockerClient, site: Settings, cpu_images: CpuImages
) -> None:
    name = cpu_images.build()
    found = inspected(name)
    assert found["id"] == engine.api.inspect_image(name)["Id"]
    assert name in found["names"]
    short = found["id"].removeprefix("sha256:")[:12]  # as `image build` prints it
    assert inspected(short) == found
    validated(found["provenance"])
    subjects = {one["name"]: one["digest"]["sha256"] for one in found["provenance"]["subject"]}
    wheel = found["build"]["wheel"]
    assert subjects == {
        "megatron:cpu-0.16.1": found["id"].removeprefix("sha256:"),
        wheel["name"]: wheel["sha256"],
    }
    text = (beside.folder(found["id"], site) / beside.SBOM).read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    listed = {one["purl"] for one in found["sbom"]["components"]}
    assert {"pkg:pypi/torch@2.13.0%2Bcpu", "pkg:pypi/megatron-core@0.16.1"} <= listed


def test_its_documents_come_with_an_image_from_a_registry(
    engine: DockerClient, registry: Registry, cpu_images: CpuImages, tmp_path: Path
) -> None:
    name = cpu_images.build()
    where = ["--registry", registry.address]
    pushed = launcher("image", "push", name, *where)
    assert pushed.returncode == 0, pushed.stderr
    assert "with provenance.json, sbom.cdx.json" in pushed.stderr
    pulled = launcher("image", "pull", name, *where, LAUNCHER_CACHE=str(tmp_path))
    assert pulled.returncode == 0, pulled.stderr
    for line in pushed.stdout.splitlines():
        engine.images.remove(line.split()[0])
    here, there = inspected(name), inspected(name, LAUNCHER_CACHE=str(tmp_path))
    assert there.pop("folder") != here.pop("folder")
    assert there == here
    assert there["provenance"]
    assert there["sbom"]


def test_the_lists_hold_exactly_what_was_installed(
    engine: DockerClient, cpu_images: CpuImages
) -> None:
    """The metadata of every package that the image has in our folders, against the SBOM."""
    name = cpu_images.build()
    listing = "ls -d /opt/megatron/lib/*.dist-info /opt/packages/lib/*.dist-info"
    printed = engine.containers.run(name, ["sh", "-c", listing], network_mode="none", remove=True)
    stems = {Path(line).name.removesuffix(".dist-info") for line in printed.decode().split()}
    there = {tuple(stem.lower().replace("_", "-").rsplit("-", 1)) for stem in stems}
    sbom = inspected(name)["sbom"]["components"]
    listed = {
        (one["name"].lower().replace("_", "-"), one["version"])
        for one in sbom
        if one["purl"].startswith("pkg:pypi/")
    }
    assert there == listed


def test_labels_say_what_the_image_is(cpu_images: CpuImages, bases: Bases) -> None:
    release = load_lock().releases["0.16.1"]
    assert release.sdist is not None
    labels = inspected(cpu_images.build())["labels"]
    created = datetime.fromisoformat(labels[f"{OCI}created"])
    assert created == datetime.fromtimestamp(release.sdist.epoch, timezone.utc)
    assert labels[f"{OCI}title"] == "Megatron-LM 0.16.1 on cpu"
    assert labels[f"{OCI}version"] == "0.16.1"
    assert labels[f"{OCI}source"] == load_matrix().releases["0.16.1"].git.url
    assert labels[f"{OCI}revision"] == "megatron-core 0.16.1"
    assert labels[f"{OCI}base.name"] == bases.base


def test_documents_that_are_gone_are_written_again_byte_for_byte(
    site: Settings, cpu_images: CpuImages
) -> None:
    folder = beside.folder(inspected(cpu_images.build())["id"], site)
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    assert set(before) == {beside.PROVENANCE, beside.SBOM}
    shutil.rmtree(folder)
    cpu_images.build()
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == before


def test_another_clone_user_and_day_write_the_same_bytes(
    site: Settings, cpu_images: CpuImages, bases: Bases, tmp_path: Path
) -> None:
    """The image is found by its key there; its documents are made of that clone's own inputs."""
    folder = beside.folder(inspected(cpu_images.build())["id"], site)
    clone, cache = tmp_path / "clone", tmp_path / "cache"
    for part in ("launcher", "patches"):
        shutil.copytree(ROOT / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
    for part in ("matrix.yaml", "matrix.lock", "Dockerfile.template"):
        shutil.copy(ROOT / part, clone)
    cache.mkdir()
    for part in ("sha256", "git"):
        if (site.cache / part).is_dir():
            (cache / part).symlink_to(site.cache / part)
    who = {"HOME": str(tmp_path), "USER": "other", "TZ": "Asia/Tokyo", "LANG": "C"}
    done = subprocess.run(
        [sys.executable, "-c", BUILD, bases.base, bases.builder, NAMES],
        cwd=clone,
        env=os.environ | who | {"LAUNCHER_CACHE": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{clone} True\n", done.stderr
    for name in (beside.PROVENANCE, beside.SBOM):
        assert (cache / "images" / folder.name / name).read_bytes() == (folder / name).read_bytes()


def test_what_is_not_on_this_machine_is_said_and_not_made(
    cpu_images: CpuImages, tmp_path: Path
) -> None:
    name = cpu_images.build()
    done = launcher("image", "inspect", name, LAUNCHER_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not on this machine") == 2
    assert "org.opencontainers.image.title" in done.stdout
    assert inspected(name, LAUNCHER_CACHE=str(tmp_path))["sbom"] is None
    refused(launcher("image", "scan", name, LAUNCHER_CACHE=str(tmp_path)), 2, "no sbom.cdx.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("document", "old", "new"),
    [
        (beside.PROVENANCE, '"sha256": "', '"sha256": "0'),
        (beside.PROVENANCE, '"subject"', '"subjects"'),
        (beside.PROVENANCE, "{", "["),
        (beside.SBOM, '"bom-ref": "sha256:', '"bom-ref": "sha256:0'),
        (beside.SBOM, '"metadata"', '"data"'),
    ],
)
def test_a_document_about_something_else_is_refused(
    site: Settings, cpu_images: CpuImages, tmp_path: Path, document: str, old: str, new: str
) -> None:
    name = cpu_images.build()
    folder = beside.folder(inspected(name)["id"], site)
    copy = tmp_path / "images" / folder.name
    shutil.copytree(folder, copy)
    (copy / document).write_text((copy / document).read_text().replace(old, new))
    done = launcher("image", "inspect", name, LAUNCHER_CACHE=str(tmp_path))
    refused(done, 122, str(copy), "Remove it")


def test_an_image_that_is_not_ours_or_not_there_is_refused(python_image: str) -> None:
    refused(launcher("image", "inspect", python_image), 2, python_image, "/opt/megatron/build.json")
    refused(launcher("image", "inspect", f"{NAMES}:none"), 125, f"{NAMES}:none")


def test_an_image_is_scanned_by_its_own_list(cpu_images: CpuImages) -> None:
    name = cpu_images.build()
    with serving(Osv, record("A-1", "megatron-core", summary="")) as api:
        done = launcher("image", "scan", name, "--database", api)
    assert done.returncode == 1, done.stderr
    assert done.stdout == "megatron-core 0.16.1  A-1  no fix recorded  no summary\n"
    assert "26 packages, 1 known vulnerability" in done.stderr
