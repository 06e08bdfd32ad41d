"""The documents of an image: as in-toto, SLSA and CycloneDX ask, whole, and about that image."""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage
from jsonschema import Draft7Validator

from launcher import __version__
from launcher.base.errors import BuildError, UsageError
from launcher.base.settings import Settings
from launcher.images.builder import attest, beside, context, image
from launcher.images.builder.sbom import sbom
from launcher.images.matrix.matrix_file import load_lock, load_matrix
from launcher.images.sources import fetch
from launcher.images.sources.extensions import ExtensionSource
from launcher.images.sources.pins import StartImage
from tests.images.builder.made import (
    BASE,
    COMMIT,
    IMAGE,
    RECIPE,
    SDIST,
    SOURCES,
    TREE,
    WHEEL,
    inputs_of,
    made,
)
from tests.images.oci.fake_registry import holding

KINDS = ["git", "sdist", "path"]


def validated(statement: dict[str, Any]) -> Provenance:
    """The predicate as its own message. Raises for a statement that in-toto or SLSA refuse."""
    message = json_format.ParseDict(statement, StatementMessage())
    Statement.copy_from_pb(message).validate()
    predicate = json_format.ParseDict(statement["predicate"], Provenance())
    for one in predicate.build_definition.resolved_dependencies:
        ResourceDescriptor.copy_from_pb(one).validate()
        assert one.digest
    assert predicate.build_definition.build_type
    assert predicate.run_details.builder.id
    return predicate


@pytest.mark.parametrize("kind", KINDS)
def test_a_statement_is_what_in_toto_and_slsa_publish(kind: Any) -> None:
    statement = attest.provenance(made(kind))
    assert attest.provenance(made(kind)) == statement
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    predicate = validated(statement)
    given = dict(predicate.build_definition.external_parameters)
    assert given == {
        "row": "24.10",
        "release": "0.9.0",
        "source": kind,
        "base": "nvcr.io/nvidia/pytorch:24.10-py3",
        "builder": "megatron-standin-base:cp311",
    }
    assert dict(predicate.run_details.builder.version) == {"megatron-launchpad": __version__}


def dependencies(kind: Any = "git", **changes: object) -> dict[str, dict[str, Any]]:
    """What went in, by name, or by URI where there is none."""
    definition = attest.provenance(made(kind, **changes))["predicate"]["buildDefinition"]
    found = definition["resolvedDependencies"]
    named = {one.get("name") or one["uri"]: one for one in found}
    assert len(named) == len(found)
    return named


def test_all_that_went_in_is_named_with_its_hash() -> None:
    found = dependencies()
    assert found["base"] == {
        "name": "base",
        "uri": "pkg:docker/nvidia/pytorch@24.10-py3?repository_url=nvcr.io",
        "digest": {"sha256": "c" * 64},
        "annotations": {"pinned": True},
    }
    assert found["builder"]["annotations"] == {"pinned": False}
    torch = found["pkg:pypi/torch@2.13.0%2Bcpu"]
    assert torch["digest"] == {"sha256": "7" * 64}
    assert torch["annotations"] == {"for": ["packages"]}
    assert found["pkg:pypi/einops@0.8.2"]["annotations"] == {"for": ["build", "runtime"]}
    for patch in made().inputs.patches:
        name = f"patches/0.9.0/{patch.name}"
        assert found[name]["digest"] == {"sha256": fetch.sha256(patch)}
    assert set(context.own_files()) <= set(found)
    assert "Dockerfile" in found


def test_a_source_is_a_commit_an_sdist_or_a_checkout() -> None:
    git = dependencies("git")["Megatron-LM"]
    assert git["uri"] == f"git+https://github.com/NVIDIA/Megatron-LM.git@{COMMIT}"
    assert git["digest"] == {"gitCommit": COMMIT, "gitTree": TREE}
    sdist = dependencies("sdist")["Megatron-LM"]
    assert sdist["uri"] == "pkg:pypi/megatron-core@0.9.0"
    assert sdist["digest"] == {"sha256": SDIST}
    checkout = dependencies("path")["Megatron-LM"]
    assert checkout["annotations"]["revision"] == f"{COMMIT}+edited"
    assert "/home/me" not in json.dumps(attest.provenance(made("path")))


@pytest.mark.parametrize(
    ("of", "text", "url"),
    [
        (attest.of_pin, "torch==2.13.0+cpu", "pkg:pypi/torch@2.13.0%2Bcpu"),
        (attest.of_pin, "typing_extensions==4.16.0", "pkg:pypi/typing-extensions@4.16.0"),
        (attest.of_pin, "Mine.a==1!2", "pkg:pypi/mine-a@1%212"),
        (attest.of_image, "docker.io/library/python:3.11", "pkg:docker/python@3.11"),
        (attest.of_image, "localhost:5/a/b", "pkg:docker/a/b@latest?repository_url=localhost:5"),
        (attest.of_image, "a@sha256:" + "0" * 64, "pkg:docker/a@sha256:" + "0" * 64),
    ],
)
def test_a_pin_and_an_image_are_package_urls(of: Callable[[str], str], text: str, url: str) -> None:
    assert of(text) == url


def labels(base: StartImage) -> dict[str, str]:
    """The labels of an image of row 24.10 on this base."""
    return image.labels_of(inputs_of(SOURCES["git"], base=base))


def test_labels_name_the_base_the_commit_and_no_machine_user_or_day() -> None:
    own = labels(BASE)
    assert own["megatron-launchpad.row"] == "24.10"
    assert own["org.opencontainers.image.created"] == "2023-11-14T22:13:20+00:00"
    assert own["org.opencontainers.image.revision"] == COMMIT
    assert own["org.opencontainers.image.base.name"] == BASE.reference
    assert own["org.opencontainers.image.base.digest"] == BASE.digest
    other = labels(StartImage("mine:1", IMAGE, "mine:1", IMAGE, pinned=False))
    assert other["org.opencontainers.image.base.name"] == "mine:1"
    assert "org.opencontainers.image.base.digest" not in other  # it is not the locked one
    checkout = image.labels_of(inputs_of(SOURCES["path"]))
    assert not any("/home/me" in value for value in checkout.values())


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


@pytest.mark.parametrize("kind", KINDS)
def test_a_document_is_what_cyclonedx_publishes(kind: Any) -> None:
    check(sbom(made(kind)))


def components(kind: Any = "git") -> dict[str, dict[str, Any]]:
    """What the image adds, by package URL."""
    return {one["purl"]: one for one in json.loads(sbom(made(kind)))["components"]}


def test_it_lists_what_a_row_compiles_and_the_python_that_it_brings() -> None:
    """And not what compiles: the wheels of `extensions` are in no image.

    tests/e2e/test_attest.py compares the list with what is installed.
    """
    matrix, lock = load_matrix(), load_lock()
    name = "transformer-engine-2.10"
    compiled = ExtensionSource(name, matrix.extensions[name], lock.extensions[name], {})
    python = Path("/cache/sha256", "9" * 64, "cpython-3.12.9.tar.gz")
    pins = {**RECIPE.pins, "extensions": [f"cmake==4.4.4 --hash=sha256:{'8' * 64}"]}
    own = {"recipe": replace(RECIPE, pins=pins), "extensions": (compiled,), "interpreter": python}
    document = sbom(made(inputs=inputs_of(SOURCES["git"], **own)))
    found = {one["name"]: one for one in check(document)["components"]}
    assert {"cmake", "pip"}.isdisjoint(found)
    assert {"einops", "megatron-core"} < found.keys()
    assert found["torch"]["hashes"] == [{"alg": "SHA-256", "content": "7" * 64}]
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


PACKAGES = {"torch": "2.5.0", "einops": "0.8.2"}
RECORD = {"wheel": {"name": "megatron_core.whl", "sha256": WHEEL}}


def test_documents_lie_beside_the_image_and_are_read_back(empty_site: Settings) -> None:
    assert not beside.is_kept(IMAGE, empty_site)
    nothing = beside.kept(IMAGE, empty_site)
    assert (nothing.provenance, nothing.sbom) == (None, None)
    beside.check_documents(nothing, IMAGE, RECORD)
    beside.write_documents(made(), PACKAGES, empty_site)
    assert beside.is_kept(IMAGE, empty_site)
    found = beside.kept(IMAGE, empty_site)
    assert found.folder == empty_site.cache / "images" / IMAGE.removeprefix("sha256:")
    beside.check_documents(found, IMAGE, RECORD)
    assert {path.name for path in found.folder.glob("[!.]*")} == {*beside.NAMES}
    assert beside.packages(IMAGE, empty_site) == PACKAGES
    assert beside.packages("sha256:" + "0" * 64, empty_site) is None


@pytest.mark.parametrize("name", [beside.PROVENANCE, beside.SBOM])
@pytest.mark.parametrize("text", ["", "{", "\xff", "[]", "{}", "null", '"text"'])
def test_a_document_that_is_none_is_refused_by_its_place(
    empty_site: Settings, name: str, text: str
) -> None:
    beside.write_documents(made(), PACKAGES, empty_site)
    (beside.folder(IMAGE, empty_site) / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(BuildError, match=IMAGE.removeprefix("sha256:")) as caught:
        beside.check_documents(beside.kept(IMAGE, empty_site), IMAGE, RECORD)
    assert "Remove it" in caught.value.remedy


@pytest.mark.parametrize(("image", "wheel"), [("sha256:" + "0" * 64, WHEEL), (IMAGE, "0" * 64)])
def test_documents_of_another_image_or_wheel_are_refused(
    empty_site: Settings, image: str, wheel: str
) -> None:
    beside.write_documents(made(), PACKAGES, empty_site)
    found = beside.kept(IMAGE, empty_site)
    with pytest.raises(BuildError, match="another image or wheel"):
        beside.check_documents(found, image, {"wheel": {"sha256": wheel}})


OTHER = {"metadata": {"component": {"bom-ref": "sha256:" + "0" * 64}}}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (OTHER, " is about another image"),
        *(({"components": told}, ": components") for told in ([1], {"name": 1}, "x", None, [{}])),
        *(
            ({"components": [{"name": "x", "purl": "pkg:pypi/x", **version}]}, r": components\.0")
            for version in ({}, {"version": "none"}, {"version": 1})
        ),
    ],
)
def test_an_sbom_of_another_image_or_of_no_packages_is_refused(
    empty_site: Settings, changed: dict[str, object], said: str
) -> None:
    """Scanners stumble over a package without a version."""
    beside.write_documents(made(), PACKAGES, empty_site)
    path = beside.folder(IMAGE, empty_site) / beside.SBOM
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(BuildError, match=rf"sbom\.cdx\.json{said}"):
        beside.check_documents(beside.kept(IMAGE, empty_site), IMAGE, RECORD)


def engine_with(content: bytes) -> Any:
    """An engine whose image has this as its build.json."""
    container = holding(**{"/opt/megatron/build.json": (content, tarfile.REGTYPE)})
    container.remove = lambda **_: None
    containers = SimpleNamespace(create=lambda *_, **__: container)
    return SimpleNamespace(containers=containers, api=SimpleNamespace(containers=lambda **_: []))


@pytest.mark.parametrize(
    "content", [b"", b"null", b"[", b"[" * 100_000, b"{}", b'{"wheel": 1}', bytes(5 << 20)]
)
def test_the_record_of_an_image_is_read_where_it_is_ours(content: bytes) -> None:
    """Any image can have something there, of any size; it was a traceback."""
    record = {"wheel": {"name": "w.whl", "sha256": WHEEL}, "patches": {}, "release": "0.9.0"}
    assert beside.record(engine_with(json.dumps(record).encode()), IMAGE) == record
    with pytest.raises(UsageError, match=r"megatron:x: its /opt/megatron/build\.json is none of"):
        beside.record(engine_with(content), IMAGE, "megatron:x")


def test_a_write_that_was_cut_short_leaves_no_document_and_the_next_one_is_whole(
    empty_site: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a process that is killed: the file that was being written is never in its place."""
    replace, done = os.replace, []

    def killed(*paths: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(paths)
        replace(*paths)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            beside.write_documents(made(), PACKAGES, empty_site)
    assert not beside.is_kept(IMAGE, empty_site)
    beside.write_documents(made(), PACKAGES, empty_site)
    beside.check_documents(beside.kept(IMAGE, empty_site), IMAGE, RECORD)
