"""The bill of materials of an image, held against CycloneDX's own schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from launcher.build.extensions import ExtensionSource
from launcher.build.sbom import sbom
from launcher.matrix.load import load_lock, load_matrix
from tests.build.made import COMMIT, IMAGE, SDIST, WHEEL, made

SCHEMA = JsonStrictValidator(SchemaVersion.V1_6)


@pytest.mark.parametrize("kind", ["git", "sdist", "path"])
def test_a_document_is_what_cyclonedx_publishes(kind: Any) -> None:
    assert SCHEMA.validate_str(sbom(made(kind))) is None


def test_the_schema_refuses_what_is_wrong() -> None:
    document = json.loads(sbom(made()))
    document["metadata"]["component"]["hashes"][0]["content"] = "none"
    assert SCHEMA.validate_str(json.dumps(document)) is not None


def components(kind: Any = "git") -> dict[str, dict[str, Any]]:
    """What the image adds, by package URL."""
    return {one["purl"]: one for one in json.loads(sbom(made(kind)))["components"]}


def test_it_lists_what_is_added_and_nothing_that_only_builds() -> None:
    found = components()
    assert {url.partition("@")[0] for url in found} == {
        "pkg:pypi/einops",
        "pkg:pypi/torch",
        "pkg:pypi/megatron-core",
        "pkg:generic/megatron-launchpad",
    }
    torch = found["pkg:pypi/torch@2.13.0%2Bcpu"]
    assert torch["version"] == "2.13.0+cpu"
    assert torch["hashes"] == [{"alg": "SHA-256", "content": "7" * 64}]


def test_it_lists_what_a_row_compiles_and_the_python_that_it_brings() -> None:
    """And not what compiles: the wheels of `extensions` are in no image."""
    matrix, lock = load_matrix(), load_lock()
    name = "transformer-engine-2.10"
    compiled = ExtensionSource(name, matrix.extensions[name], lock.extensions[name], {})
    python = Path("/cache/sha256", "9" * 64, "cpython-3.12.9.tar.gz")
    inputs = made().inputs
    row = replace(
        inputs,
        pins={**inputs.pins, "extensions": [f"cmake==4.4.4 --hash=sha256:{'8' * 64}"]},
        extensions=(compiled,),
        interpreter=python,
    )
    document = sbom(made(inputs=row))
    assert SCHEMA.validate_str(document) is None
    found = {one["name"]: one for one in json.loads(document)["components"]}
    assert "cmake" not in found
    assert found[python.name]["hashes"] == [{"alg": "SHA-256", "content": "9" * 64}]
    extension = found["transformer-engine"]
    assert extension["version"] == compiled.locked.git.commit
    assert {one["uid"] for one in extension["pedigree"]["commits"]} == {
        git.commit for git in compiled.commits.values()
    }


def test_megatron_has_its_wheel_its_commit_and_its_patches() -> None:
    megatron = components()["pkg:pypi/megatron-core@0.9.0"]
    assert megatron["hashes"] == [{"alg": "SHA-256", "content": WHEEL}]
    assert megatron["pedigree"]["commits"][0]["uid"] == COMMIT
    assert len(megatron["pedigree"]["patches"]) == 2
    sdist = components("sdist")["pkg:pypi/megatron-core@0.9.0"]
    assert "commits" not in sdist["pedigree"]
    assert {"alg": "SHA-256", "content": SDIST} in [
        one for reference in sdist["externalReferences"] for one in reference.get("hashes", [])
    ]
    checkout = components("path")["pkg:pypi/megatron-core@0.9.0"]
    assert f"{COMMIT}+edited" in checkout["pedigree"]["notes"]


def test_the_image_depends_on_all_that_it_adds_and_lies_on_its_base() -> None:
    document = json.loads(sbom(made()))
    image = document["metadata"]["component"]
    assert image["bom-ref"] == IMAGE
    assert image["pedigree"]["ancestors"][0]["name"] == "nvcr.io/nvidia/pytorch:24.10-py3"
    needs = {one["ref"]: one.get("dependsOn", []) for one in document["dependencies"]}
    assert set(needs[IMAGE]) == {one["bom-ref"] for one in document["components"]}


def test_equal_images_give_equal_bytes_and_another_image_another_serial_number() -> None:
    assert sbom(made()) == sbom(made())
    document = json.loads(sbom(made()))
    assert document["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")
    other = json.loads(sbom(made(id="sha256:" + "0" * 64)))
    assert document["serialNumber"].startswith("urn:uuid:")
    assert document["serialNumber"] != other["serialNumber"]
