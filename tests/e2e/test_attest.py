"""A real build, the documents beside it, and what inspect reads back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launcher.base.settings import Settings
from launcher.images.builder import beside
from tests.conftest import NAMES
from tests.e2e.command import in_image, launcher, refused
from tests.images.builder import test_attest

if TYPE_CHECKING:
    from docker import DockerClient


pytestmark = pytest.mark.engine


def inspected(name: str, **env: str) -> dict[str, Any]:
    """What `image inspect --json` prints."""
    done = launcher("image", "inspect", name, "--json", **env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_an_image_is_documented_and_inspect_reads_it_back(
    engine: DockerClient, site: Settings, image: str
) -> None:
    found = inspected(image)
    assert found["id"] == engine.api.inspect_image(image)["Id"]
    assert image in found["names"]
    short = found["id"].removeprefix("sha256:")[:12]  # as `image build` prints it
    assert inspected(short) == found
    test_attest.validated(found["provenance"])
    subjects = {one["name"]: one["digest"]["sha256"] for one in found["provenance"]["subject"]}
    wheel = found["build"]["wheel"]
    assert subjects == {
        "megatron:cpu-0.16.1": found["id"].removeprefix("sha256:"),
        wheel["name"]: wheel["sha256"],
    }
    test_attest.check((beside.folder(found["id"], site) / beside.SBOM).read_text())
    listed = {one["purl"] for one in found["sbom"]["components"]}
    assert {"pkg:pypi/torch@2.13.0%2Bcpu", "pkg:pypi/megatron-core@0.16.1"} <= listed


def test_the_lists_hold_exactly_what_was_installed(engine: DockerClient, image: str) -> None:
    """The metadata of every package that the image has in our folders, against the SBOM."""
    listing = "ls -d /opt/megatron/lib/*.dist-info /opt/packages/lib/*.dist-info"
    printed = in_image(engine, image, "sh", "-c", listing)
    stems = {Path(line).name.removesuffix(".dist-info") for line in printed.split()}
    there = {tuple(stem.lower().replace("_", "-").rsplit("-", 1)) for stem in stems}
    sbom = inspected(image)["sbom"]["components"]
    listed = {
        (one["name"].lower().replace("_", "-"), one["version"])
        for one in sbom
        if one["purl"].startswith("pkg:pypi/")
    }
    assert there == listed


def test_what_is_not_on_this_machine_is_said_and_not_made(image: str, tmp_path: Path) -> None:
    done = launcher("image", "inspect", image, LAUNCHER_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("not on this machine") == 2
    assert "org.opencontainers.image.title" in done.stdout
    assert inspected(image, LAUNCHER_CACHE=str(tmp_path))["sbom"] is None
    assert not list(tmp_path.iterdir())


def test_an_image_that_is_not_ours_or_not_there_is_refused(python_image: str) -> None:
    refused(launcher("image", "inspect", python_image), 2, python_image, "/opt/megatron/build.json")
    refused(launcher("image", "inspect", f"{NAMES}:none"), 125, f"{NAMES}:none")
