"""The bill of materials of an image, held against what CycloneDX asks of one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator

from launcher.build.extensions import ExtensionSource
from launcher.build.sbom import sbom
from launcher.matrix.load import load_lock, load_matrix
from tests.build.made import COMMIT, IMAGE, RECIPE, SDIST, SOURCES, WHEEL, inputs_of, made

TEXT = {"type": "string", "minLength": 1}


def things(required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no other."""
    names = required.split()
    own = {name: properties.get(name, TEXT) for name in [*names, *properties]}
    return {"type": "object", "required": names, "properties": own, "additionalProperties": False}


def many(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "uniqueItems": True}


HASHES = many(
    things("alg content", alg={"const": "SHA-256"}, content={"pattern": "^[a-f0-9]{64}$"})
)
COMPONENT = things(
    "type name",
    type={"enum": ["application", "container", "library", "platform"]},
    version=TEXT,
    hashes=HASHES,
    purl={"pattern": r"^pkg:[a-z]+/[\w.%~/-]+(@[\w.:%~-]+)?(\?[a-z_]+=[\w.:%~/+@-]+)?$"},
    properties=many(things("name value")),
    externalReferences=many(
        things("url type", type={"enum": ["vcs", "source-distribution"]}, hashes=HASHES)
    ),
    pedigree=things(
        "",
        ancestors=many({"$ref": "#/definitions/component"}),
        commits=many(things("", uid=TEXT, url=TEXT)),
        patches=many(things("type", type={"const": "unofficial"}, diff=things("", url=TEXT))),
        notes=TEXT,
    ),
    **{"bom-ref": TEXT},
)
UUID = "[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}"
SCHEMA = {
    **things(
        "$schema bomFormat specVersion version serialNumber metadata components dependencies",
        bomFormat={"const": "CycloneDX"},
        specVersion={"const": "1.6"},
        version={"const": 1},
        serialNumber={"pattern": f"^urn:uuid:{UUID}$"},
        metadata=things(
            "timestamp tools component",
            timestamp={"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00$"},
            tools=things("components", components=many({"$ref": "#/definitions/component"})),
            component={"$ref": "#/definitions/component"},
        ),
        components=many({"$ref": "#/definitions/component"}),
        dependencies=many(things("ref", dependsOn=many(TEXT))),
    ),
    "definitions": {"component": COMPONENT},
}
"""What of https://cyclonedx.org/schema/bom-1.6.schema.json is written, and no more."""


def check(text: str) -> dict[str, Any]:
    """The document. Raises for one that isn't what CycloneDX publishes."""
    document: dict[str, Any] = json.loads(text)
    Draft7Validator(SCHEMA).validate(document)
    refs = [one["bom-ref"] for one in document["components"]]
    assert len({*refs}) == len(refs)
    refs += [document["metadata"]["component"]["bom-ref"]]
    for one in document["dependencies"]:
        assert {one["ref"], *one.get("dependsOn", [])} <= {*refs}
    return document


@pytest.mark.parametrize("kind", ["git", "sdist", "path"])
def test_a_document_is_what_cyclonedx_publishes(kind: Any) -> None:
    check(sbom(made(kind)))


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
    pins = {**RECIPE.pins, "extensions": [f"cmake==4.4.4 --hash=sha256:{'8' * 64}"]}
    own = {"recipe": replace(RECIPE, pins=pins), "extensions": (compiled,), "interpreter": python}
    document = sbom(made(inputs=inputs_of(SOURCES["git"], **own)))
    found = {one["name"]: one for one in check(document)["components"]}
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
    assert sbom(made()) == sbom(made())
    assert document["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")
    other = json.loads(sbom(made(id="sha256:" + "0" * 64)))
    assert document["serialNumber"] != other["serialNumber"]
