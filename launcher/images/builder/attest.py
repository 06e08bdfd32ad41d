"""Writes what an image was made of: SLSA provenance, as an in-toto statement.

The JSON is written plainly. The in-toto package for Python is protobuf messages, last released in
2023, and would bring protobuf to every user; the tests hold each statement against its messages.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from packaging.utils import canonicalize_name

from launcher import __version__
from launcher.base.reference import HUB, parse_reference
from launcher.images.builder import context
from launcher.images.matrix.recipe import sha256_of_pin
from launcher.images.sources import fetch
from launcher.images.sources.pins import StartImage

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
LAUNCHER = "pkg:generic/megatron-launchpad"
BUILD_TYPE = f"{LAUNCHER}#docs/reproducible.md"


@dataclass(frozen=True)
class ImageRecord:
    """An image, and all that its documents are written from; equal values give equal bytes.

    name: megatron:24.10-0.9.0; id: sha256:…; wheel: name and sha256 of the wheel in it; of_base:
    packages that Megatron needs and that the base has itself, so that they were left out
    """

    name: str
    id: str
    inputs: context.Inputs
    wheel: dict[str, str]
    of_base: tuple[str, ...] = ()


def provenance(made: ImageRecord) -> dict[str, Any]:
    """The statement: https://slsa.dev/spec/v1.0/provenance, without times, which no input has."""
    inputs, source = made.inputs, made.inputs.source
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": made.name, "digest": _sha256(made.id)},
            {"name": made.wheel["name"], "digest": _sha256(made.wheel["sha256"])},
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "row": inputs.recipe.tag,
                    "release": source.release,
                    "source": source.kind,
                    "base": inputs.base.reference,
                    "builder": inputs.builder.reference,
                    **({"extras": [*extras]} if (extras := inputs.recipe.extras.names) else {}),
                },
                "internalParameters": {
                    "key": inputs.key(),
                    "epoch": source.epoch,
                    "extension": inputs.recipe.named.extension,
                    "version": inputs.version,
                    **({"rules": source.rules} if source.rules else {}),
                    **({"architectures": inputs.architectures} if inputs.architectures else {}),
                },
                "resolvedDependencies": _dependencies(made),
            },
            "runDetails": {
                "builder": {"id": LAUNCHER, "version": {"megatron-launchpad": __version__}}
            },
        },
    }


def purl(kind: str, name: str, version: str = "", **qualifiers: str) -> str:
    """A package URL: https://github.com/package-url/purl-spec; name: with its namespace."""
    quoted = [f"{key}={quote(value, safe='/:')}" for key, value in sorted(qualifiers.items())]
    text = f"pkg:{kind}/{quote(name)}" + (f"@{quote(version, safe=':')}" if version else "")
    return "?".join([text, *(["&".join(quoted)] if quoted else [])])


def of_pin(pin: str) -> str:
    """The package URL of `name==version --hash=sha256:…`."""
    name, _, version = pin.partition(" ")[0].partition("==")
    return purl("pypi", canonicalize_name(name), version)


def of_image(reference: str) -> str:
    """The package URL of an image reference; without a host it is Docker Hub's or this engine's."""
    at = parse_reference(reference)
    if at.registry == HUB:
        return purl("docker", at.repository.removeprefix("library/"), at.target)
    return purl("docker", at.repository, at.target, repository_url=at.registry)


def _dependencies(made: ImageRecord) -> list[dict[str, Any]]:
    """What went in, as in-toto's resource descriptors: images, source, patches, files, wheels."""
    inputs = made.inputs
    files = {
        **{f"patches/{path.parent.name}/{path.name}": path for path in inputs.patches},
        **context.own_files(),
    }
    dockerfile = hashlib.sha256(inputs.dockerfile.encode()).hexdigest()
    groups: dict[str, list[str]] = {}
    for group, pins in inputs.recipe.pins.items():
        for pin in pins:
            groups.setdefault(pin, []).append(group)
    return [
        _image("base", inputs.base),
        _image("builder", inputs.builder),
        _source(made),
        *(
            _commit(f"{one.name}/{path}".rstrip("/"), url, commit.commit, commit.tree)
            for one in inputs.extensions
            for path, url in one.urls.items()
            for commit in [one.commits[path]]
        ),
        *(
            [{"name": inputs.interpreter.name, "digest": _sha256(inputs.interpreter.parent.name)}]
            if inputs.interpreter
            else []
        ),
        {"name": "Dockerfile", "digest": _sha256(dockerfile)},
        *({"name": name, "digest": _sha256(fetch.sha256(path))} for name, path in files.items()),
        *(
            {
                "uri": of_pin(pin),
                "digest": _sha256(sha256_of_pin(pin)),
                "annotations": {"for": sorted(groups[pin])},
            }
            for pin in sorted(groups)
        ),
    ]


def _image(name: str, image: StartImage) -> dict[str, Any]:
    return {
        "name": name,
        "uri": of_image(image.reference),
        "digest": _sha256(image.digest),
        "annotations": {"pinned": image.pinned},
    }


def _source(made: ImageRecord) -> dict[str, Any]:
    """Megatron's source: a commit and its tree, an sdist, or a hash over a checkout's files."""
    source = made.inputs.source
    if source.kind == "git":
        url = made.inputs.recipe.named.git.url
        return _commit("Megatron-LM", url, source.revision, source.identity)
    if source.kind == "sdist":
        return {
            "name": "Megatron-LM",
            "uri": purl("pypi", "megatron-core", source.release),
            "digest": _sha256(source.identity),
        }
    return {
        "name": "Megatron-LM",
        "digest": _sha256(source.identity),
        "annotations": {"revision": source.revision, "of": "a checkout's files"},
    }


def _commit(name: str, url: str, commit: str, tree: str) -> dict[str, Any]:
    digest = {"gitCommit": commit, "gitTree": tree}
    return {"name": name, "uri": f"git+{url}@{commit}", "digest": digest}


def _sha256(digest: str) -> dict[str, str]:
    return {"sha256": digest.removeprefix("sha256:")}
