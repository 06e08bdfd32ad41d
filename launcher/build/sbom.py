"""Lists what an image adds to its base, as a CycloneDX bill of materials.

What is in the base is its publisher's to list; it is named as the image's ancestor.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from launcher import __version__
from launcher.build import attest, context, fetch
from launcher.build.attest import LAUNCHER, Made

if TYPE_CHECKING:
    from cyclonedx.model import HashType
    from cyclonedx.model.component import Component, Pedigree

NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, LAUNCHER)
"""Of serial numbers: a name-based UUID (RFC 9562, version 5) is the same for the same image."""


def sbom(made: Made) -> str:
    """The document, CycloneDX 1.6 in JSON; its time is that of the source."""
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.model.tool import ToolRepository
    from cyclonedx.output.json import JsonV1Dot6

    tool = Component(
        name="megatron-launchpad",
        version=__version__,
        type=ComponentType.APPLICATION,
        bom_ref="tool",
    )
    image = _image(made)
    added = [_megatron(made), _launcher(), *_packages(made), *_compiled(made), *_python(made)]
    bom = Bom(
        serial_number=uuid.uuid5(NAMESPACE, made.id),
        metadata=BomMetaData(
            timestamp=datetime.fromtimestamp(made.inputs.source.epoch, timezone.utc),
            tools=ToolRepository(components=[tool]),
            component=image,
        ),
        components=added,
    )
    bom.register_dependency(image, added)
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _image(made: Made) -> Component:
    """The image, and the base it lies on."""
    from cyclonedx.model.component import Component, ComponentType, Pedigree

    name, _, version = made.name.rpartition(":")
    base = Component(
        name=made.base.reference,
        type=ComponentType.CONTAINER,
        purl=attest.of_image(made.base.reference),
        bom_ref="base",
        hashes=[_sha256(made.base.digest)],
    )
    return Component(
        name=name,
        version=version,
        type=ComponentType.CONTAINER,
        purl=attest.of_image(f"{name}@{made.id}"),
        bom_ref=made.id,
        hashes=[_sha256(made.id)],
        pedigree=Pedigree(ancestors=[base]),
    )


def _megatron(made: Made) -> Component:
    """Megatron's wheel, with where its source is from and which patches it has."""
    from cyclonedx.model import ExternalReference, ExternalReferenceType, XsUri
    from cyclonedx.model.component import Component

    source = made.inputs.source
    purl = attest.of_pin(f"megatron-core=={made.inputs.version}")
    references = [ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(made.url))]
    if source.kind == "sdist":
        references.append(
            ExternalReference(
                type=ExternalReferenceType.SOURCE_DISTRIBUTION,
                url=XsUri(str(purl)),
                hashes=[_sha256(source.identity)],
            )
        )
    return Component(
        name="megatron-core",
        version=made.inputs.version,
        purl=purl,
        bom_ref=str(purl),
        hashes=[_sha256(made.wheel["sha256"])],
        external_references=references,
        pedigree=_pedigree(made),
    )


def _pedigree(made: Made) -> Pedigree:
    """The commit, or what is known of a checkout, and the patches."""
    from cyclonedx.model import XsUri
    from cyclonedx.model.component import Commit, Diff, Patch, PatchClassification, Pedigree

    source = made.inputs.source
    commit = Commit(uid=source.revision, url=XsUri(made.url))
    patches = [
        Patch(
            type=PatchClassification.UNOFFICIAL,
            diff=Diff(url=XsUri(f"patches/{path.parent.name}/{path.name}")),
        )
        for path in made.inputs.patches
    ]
    rules = f", built by the rules of {source.rules}" if source.rules else ""
    return Pedigree(
        commits=[commit] if source.kind == "git" else [],
        patches=patches,
        notes=f"a checkout: {source.revision}{rules}" if source.kind == "path" else None,
    )


def _launcher() -> Component:
    """The launcher's own files in the image."""
    from cyclonedx.model import Property
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    purl = PackageURL.from_string(f"{LAUNCHER}@{__version__}")
    return Component(
        name="megatron-launchpad",
        version=__version__,
        type=ComponentType.APPLICATION,
        purl=purl,
        bom_ref=str(purl),
        properties=[Property(name="megatron-launchpad:inside", value=context.inside_digest())],
    )


def _packages(made: Made) -> list[Component]:
    """The packages from wheels: Megatron's needs, and what the base lacks."""
    from cyclonedx.model.component import Component

    return [
        Component(
            name=purl.name,
            version=purl.version,
            purl=purl,
            bom_ref=str(purl),
            hashes=[_sha256(fetch.sha256_of_pin(pin))],
        )
        for pin, purl in ((pin, attest.of_pin(pin)) for pin in made.inputs.added)
    ]


def _compiled(made: Made) -> list[Component]:
    """The extensions that were compiled on the base, with their commits and submodules'."""
    from cyclonedx.model import XsUri
    from cyclonedx.model.component import Commit, Component, Pedigree
    from packageurl import PackageURL

    found = []
    for one in made.inputs.extensions:
        urls = {"": one.wanted.git.url, **one.wanted.submodules}
        commits = [
            Commit(uid=git.commit, url=XsUri(urls[path])) for path, git in one.commits.items()
        ]
        own = one.locked.git.commit
        source = {"vcs_url": f"git+{one.wanted.git.url}@{own}"}
        purl = PackageURL("generic", name=one.wanted.package, version=own, qualifiers=source)
        found.append(
            Component(
                name=one.wanted.package,
                version=own,
                purl=purl,
                bom_ref=str(purl),
                pedigree=Pedigree(commits=commits),
            )
        )
    return found


def _python(made: Made) -> list[Component]:
    """The Python of a base that had none, by its archive."""
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    archive = made.inputs.interpreter
    if archive is None:
        return []
    purl = PackageURL("generic", name=archive.name)
    return [
        Component(
            name=archive.name,
            type=ComponentType.PLATFORM,
            purl=purl,
            bom_ref=str(purl),
            hashes=[_sha256(archive.parent.name)],
        )
    ]


def _sha256(digest: str) -> HashType:
    from cyclonedx.model import HashAlgorithm, HashType

    return HashType(alg=HashAlgorithm.SHA_256, content=digest.removeprefix("sha256:"))
