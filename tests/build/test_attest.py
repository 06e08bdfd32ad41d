"""The provenance that is written of an image, held against the published messages."""

from __future__ import annotations

import copy
import io
import json
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

from launcher import __version__
from launcher.build import attest, context, fetch
from launcher.build.image import Builds, Request
from launcher.matrix.load import load_matrix
from launcher.matrix.schema import LockedImage
from launcher.progress import Progress
from launcher.settings import Settings
from tests.build.made import COMMIT, IMAGE, SDIST, TREE, WHEEL, made

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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda statement: statement.update(subject=[]),
        lambda statement: statement["subject"][0].pop("digest"),
        lambda statement: statement["predicate"].update(buildDefinitions={}),
        lambda statement: statement["predicate"]["runDetails"]["builder"].update(version="1"),
    ],
)
def test_the_validators_refuse_what_is_wrong(spoil: Any) -> None:
    statement = copy.deepcopy(attest.provenance(made()))
    spoil(statement)
    with pytest.raises((ValueError, json_format.ParseError)):
        validated(statement)


def dependencies(kind: Any = "git", **changes: object) -> dict[str, dict[str, Any]]:
    """What went in, by name, or by URI where there is none."""
    definition = attest.provenance(made(kind, **changes))["predicate"]["buildDefinition"]
    found = definition["resolvedDependencies"]
    named = {one.get("name") or one["uri"]: one for one in found}
    assert len(named) == len(found)
    return named


def test_the_subjects_are_the_image_and_its_wheel() -> None:
    subjects = attest.provenance(made())["subject"]
    assert [one["digest"]["sha256"] for one in subjects] == [IMAGE.removeprefix("sha256:"), WHEEL]


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


def test_equal_images_give_equal_statements_and_another_input_another() -> None:
    assert attest.provenance(made()) == attest.provenance(made())
    assert attest.provenance(made()) != attest.provenance(made(row="24.09"))


@pytest.mark.parametrize(
    ("pin", "url"),
    [
        ("torch==2.13.0+cpu", "pkg:pypi/torch@2.13.0%2Bcpu"),
        ("typing_extensions==4.16.0", "pkg:pypi/typing-extensions@4.16.0"),
        ("Mine.a==1!2", "pkg:pypi/mine-a@1%212"),
    ],
)
def test_a_pin_is_a_package_url(pin: str, url: str) -> None:
    assert attest.of_pin(f"{pin} --hash=sha256:{SDIST}") == url


@pytest.mark.parametrize(
    ("reference", "url"),
    [
        ("python:3.11-slim-bookworm", "pkg:docker/python@3.11-slim-bookworm"),
        ("docker.io/library/python:3.11", "pkg:docker/python@3.11"),
        ("localhost:5000/a/b/c:1", "pkg:docker/a/b/c@1?repository_url=localhost:5000"),
        ("quay.io/pypa/builder", "pkg:docker/pypa/builder@latest?repository_url=quay.io"),
        ("megatron@sha256:" + "0" * 64, "pkg:docker/megatron@sha256:" + "0" * 64),
    ],
)
def test_an_image_reference_is_a_package_url(reference: str, url: str) -> None:
    assert attest.of_image(reference) == url


BASE = load_matrix().rows["24.10"].base
PINNED = "sha256:" + "d" * 64
CONFIG = "sha256:" + "e" * 64


class Engine:
    """An engine that has the base as `docker pull` leaves it, under whatever name."""

    def __init__(self, pulled_by: list[str]) -> None:
        self.pulled_by = pulled_by

    def inspect_image(self, image: str) -> dict[str, Any]:
        return {
            "Id": image,
            "RepoDigests": self.pulled_by,
            "Os": "linux",
            "Architecture": "amd64",
        }


def labels(site: Settings, pulled_by: list[str], locked: bool, base: str | None) -> dict[str, str]:
    """The labels of an image of row 24.10 on such an engine."""
    builds = Builds(SimpleNamespace(api=Engine(pulled_by)), site, Progress(io.StringIO()))
    images = {BASE: LockedImage(digest=PINNED, platforms={})} if locked else {}
    builds.lock = builds.lock.model_copy(update={"images": images})
    inputs = replace(made("git").inputs, base=CONFIG)
    return builds._labels(Request("24.10", base=base), inputs)


def test_a_pinned_base_is_named_as_the_matrix_has_it_wherever_it_is_from(
    empty_site: Settings,
) -> None:
    """A mirror's copy of the locked image gives the same labels as the publisher's."""
    own = labels(empty_site, [f"nvcr.io/nvidia/pytorch@{PINNED}"], True, None)
    assert own["org.opencontainers.image.base.name"] == BASE
    assert own["org.opencontainers.image.base.digest"] == PINNED
    mirror = "mirror.example/pytorch:24.10-py3"
    assert labels(empty_site, [f"mirror.example/pytorch@{PINNED}"], True, mirror) == own


def test_a_base_that_is_not_the_locked_one_has_its_own_name_and_no_digest(
    empty_site: Settings,
) -> None:
    other = labels(empty_site, [], True, "mine:1")
    assert other["org.opencontainers.image.base.name"] == "mine:1"
    assert "org.opencontainers.image.base.digest" not in other
    assert "org.opencontainers.image.base.digest" not in labels(empty_site, [], False, None)


def test_labels_tell_no_machine_user_or_day(empty_site: Settings, tmp_path: Path) -> None:
    elsewhere = replace(empty_site, cache=tmp_path / "other", runs=tmp_path / "elsewhere")
    here = labels(empty_site, [], False, None)
    assert here == labels(elsewhere, [], False, None)
    assert here["org.opencontainers.image.created"] == "2023-11-14T22:13:20+00:00"
    assert here["org.opencontainers.image.revision"] == COMMIT
    assert not any(str(tmp_path) in value for value in here.values())
