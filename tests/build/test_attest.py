"""The provenance that is written of an image, held against the published messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.resource_descriptor import ResourceDescriptor
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

from launcher import __version__
from launcher.build import attest, context, fetch, image
from launcher.build.pins import StartImage
from tests.build.made import BASE, COMMIT, IMAGE, SDIST, SOURCES, TREE, inputs_of, made

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
    inside = set(context.inside_files())
    assert inside
    assert inside <= set(found)
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
    return image._labels(inputs_of(SOURCES["git"], base=base))


def test_labels_name_the_base_the_commit_and_no_machine_user_or_day() -> None:
    own = labels(BASE)
    assert own["org.opencontainers.image.created"] == "2023-11-14T22:13:20+00:00"
    assert own["org.opencontainers.image.revision"] == COMMIT
    assert own["org.opencontainers.image.base.name"] == BASE.reference
    assert own["org.opencontainers.image.base.digest"] == BASE.digest
    other = labels(StartImage("mine:1", IMAGE, "mine:1", IMAGE, pinned=False))
    assert other["org.opencontainers.image.base.name"] == "mine:1"
    assert "org.opencontainers.image.base.digest" not in other  # it is not the locked one
    checkout = image._labels(inputs_of(SOURCES["path"]))
    assert not any("/home/me" in value for value in checkout.values())
