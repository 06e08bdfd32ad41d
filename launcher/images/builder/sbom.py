"""Lists what an image adds to its base, as a CycloneDX bill of materials.

What is in the base is its publisher's to list; it is named as the image's ancestor. The JSON is
written plainly, by https://cyclonedx.org/docs/1.6/json/.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from packaging.utils import canonicalize_name

from launcher import __version__
from launcher.images.builder import attest
from launcher.images.builder.attest import LAUNCHER, ImageRecord, purl
from launcher.images.matrix.recipe import sha256_of_pin

NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, LAUNCHER)
"""Of serial numbers: a name-based UUID (RFC 9562, version 5) is the same for the same image."""


def sbom(made: ImageRecord) -> str:
    """The document, CycloneDX 1.6 in JSON; its time is that of the source."""
    added = sorted(_added(made), key=lambda one: str(one["bom-ref"]))
    refs = [one["bom-ref"] for one in added]
    name, _, version = made.name.rpartition(":")
    below = made.inputs.base
    of_base = {"type": "container", "bom-ref": "base", "name": below.reference}
    base = _component(attest.of_image(below.reference), below.digest, **of_base)
    own = {"type": "container", "bom-ref": made.id, "name": name, "version": version}
    url = attest.of_image(f"{name}@{made.id}")
    image = _component(url, made.id, **own, pedigree={"ancestors": [base]})
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(NAMESPACE, made.id).urn,
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(made.inputs.source.epoch, timezone.utc).isoformat(),
            "tools": {"components": [{**_LAUNCHER, "bom-ref": "tool"}]},
            "component": image,
        },
        "components": added,
        "dependencies": [*({"ref": ref} for ref in refs), {"ref": made.id, "dependsOn": refs}],
    }
    return json.dumps(document, indent=2, sort_keys=True) + "\n"


_LAUNCHER = {"name": "megatron-launchpad", "version": __version__, "type": "application"}


def _component(url: str, sha256: str = "", **more: Any) -> dict[str, Any]:
    """A component with a package URL, known by it; sha256: in hex, with or without its name."""
    hashes = {"hashes": _hashes(sha256)} if sha256 else {}
    return {"type": "library", "bom-ref": url, "purl": url, **hashes, **more}


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256.removeprefix("sha256:")}]


def _added(made: ImageRecord) -> Iterator[dict[str, Any]]:
    """What lies above the base: Megatron, packages, what was compiled, a Python."""
    inputs = made.inputs
    yield _megatron(made)
    pins = inputs.recipe.pins
    beside = {pin for group in ("packages", "extras") for pin in pins.get(group, ())}
    for pin in inputs.recipe.added:
        name, _, version = pin.partition(" ")[0].partition("==")
        own = {"name": canonicalize_name(name), "version": version}
        if own["name"] in made.of_base and pin not in beside:
            continue
        yield _component(attest.of_pin(pin), sha256_of_pin(pin), **own)
    for one in inputs.extensions:
        commits = [{"uid": git.commit, "url": one.urls[path]} for path, git in one.commits.items()]
        name, commit = one.wanted.package, one.locked.git.commit
        url = purl("generic", name, commit, vcs_url=f"git+{one.wanted.git.url}@{commit}")
        yield _component(url, name=name, version=commit, pedigree={"commits": commits})
    if archive := inputs.interpreter:
        url, sha256 = purl("generic", archive.name), archive.parent.name
        yield _component(url, sha256, name=archive.name, type="platform")


def _megatron(made: ImageRecord) -> dict[str, Any]:
    """Megatron's wheel: where its source is from, its commit, or what is known of a checkout."""
    source, version = made.inputs.source, made.inputs.version
    url = purl("pypi", "megatron-core", version)
    references: list[dict[str, Any]] = [{"type": "vcs", "url": made.inputs.recipe.named.git.url}]
    patches = [
        {"type": "unofficial", "diff": {"url": f"patches/{path.parent.name}/{path.name}"}}
        for path in made.inputs.patches
    ]
    pedigree: dict[str, Any] = {"patches": patches} if patches else {}
    if source.kind == "sdist":
        sdist = {"type": "source-distribution", "url": url, "hashes": _hashes(source.identity)}
        references.insert(0, sdist)
    elif source.kind == "git":
        pedigree["commits"] = [{"uid": source.revision, "url": made.inputs.recipe.named.git.url}]
    else:
        rules = f", built by the rules of {source.rules}" if source.rules else ""
        pedigree["notes"] = f"a checkout: {source.revision}{rules}"
    return _component(
        url,
        made.wheel["sha256"],
        name="megatron-core",
        version=version,
        externalReferences=references,
        pedigree=pedigree,
    )
