"""Carries an image's documents through a registry, as artifacts that refer to the image.

They are what the OCI image and distribution specifications call referrers: each document has a
manifest of its own in the image's repository, with the image as its `subject`. Registries list
them by the image's digest. For one that doesn't, the specification has clients keep that list
themselves, under a tag made of the digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from launcher.build import beside
from launcher.build.verify import is_ours
from launcher.errors import EngineError, UsageError
from launcher.images.remote import Carried
from launcher.oci.layout import MANIFEST_TYPE, Descriptor, compact, descriptor_of, sha256
from launcher.oci.registry import INDEXES, Conversation, talking
from launcher.reference import parse_reference
from launcher.screen import Progress
from launcher.settings import Settings

if TYPE_CHECKING:
    from docker import DockerClient

TYPES = {
    beside.PROVENANCE: "application/vnd.in-toto+json",
    beside.SBOM: "application/vnd.cyclonedx+json",
}
"""The media types of the documents, from in-toto's specification and IANA's list."""

TITLE = "org.opencontainers.image.title"
EMPTY, EMPTY_TYPE = b"{}", "application/vnd.oci.empty.v1+json"
INDEX_TYPE, _ = INDEXES
LISTED = "OCI-Subject"
"""The header by which a registry says that it lists a manifest by its subject."""

MOST = 64
"""Referrers that are looked at: anybody who may push can add some."""


class _Descriptor(Descriptor):
    artifactType: str = ""


class _Artifact(BaseModel):
    artifactType: str
    subject: _Descriptor
    layers: tuple[_Descriptor]


def push(pushed: Carried, documents: Mapping[str, bytes], progress: Progress) -> None:
    """Put an image's documents beside it in the registry that it was pushed to.

    Once more with the same ones it changes nothing. Of a registry that refuses them that is told;
    the image is there without them.
    """
    known = {title: documents[title] for title in TYPES if title in documents}
    if not known:
        return
    try:
        with _about(pushed) as told:
            image = told.document("manifests", told.where.target)
            subject = {"mediaType": image.media_type, "digest": image.digest, "size": image.size}
            told.put_blob(EMPTY)
            unlisted = [_put(told, subject, *document) for document in known.items()]
            _list(told, [descriptor for descriptor in unlisted if descriptor])
    except EngineError as error:
        progress.note(f"  the registry has the image without its documents: {error}")
    else:
        progress.note(f"  with {', '.join(known)}")


def pull(client: DockerClient, pulled: Carried, site: Settings, progress: Progress) -> None:
    """Put beside a pulled image those of its documents in the registry that are about it.

    Of images that the launcher didn't build none are asked for, nor of one that has them here.
    """
    if not is_ours(client.api.history(pulled.id)) or beside.is_kept(pulled.id, site):
        return
    taken: tuple[str, ...] = ()
    try:
        with _about(pulled) as asked:
            found = list(_documents(asked, progress))
        if found:
            record = beside.record(client, pulled.id, pulled.name)
            taken = beside.accept(found, pulled.id, record, site)
    except (EngineError, UsageError) as error:
        progress.note(f"  {error}")
    if taken:
        progress.note(f"  with {', '.join(taken)}")
    elif not beside.texts(pulled.id, site):
        progress.note("  without provenance or SBOM")


def _about(image: Carried) -> AbstractContextManager[Conversation]:
    return talking(f"{parse_reference(image.name).name}@{image.digest}")


def _put(
    told: Conversation, subject: dict[str, Any], title: str, document: bytes
) -> dict[str, Any] | None:
    """Put a document that refers to `subject`; its descriptor, where the registry won't list it."""
    kind, named = {"artifactType": TYPES[title]}, {"annotations": {TITLE: title}}
    layer = descriptor_of(TYPES[title], document) | named
    told.put_blob(document)
    content = compact(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": descriptor_of(EMPTY_TYPE, EMPTY),
            "layers": [layer],
            "subject": subject,
            **kind,
            **named,
        }
    )
    answer = told.put_manifest(content, MANIFEST_TYPE, sha256(content))
    listed = LISTED in answer.headers
    return None if listed else descriptor_of(MANIFEST_TYPE, content) | kind | named


def _list_of(about: Conversation) -> str:
    """The tag of the list that clients keep: the distribution specification's referrers tag."""
    return about.where.target.replace(":", "-")


def _list(told: Conversation, made: list[dict[str, Any]]) -> None:
    """Add to the list that clients keep what it lacks."""
    tag = _list_of(told)
    empty: dict[str, Any] = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": []}
    before = told.index(f"manifests/{tag}") or empty
    listed = [each.get("digest") for each in before["manifests"] if isinstance(each, dict)]
    new = [descriptor for descriptor in made if descriptor["digest"] not in listed]
    if new:
        after = before | {"manifests": [*before["manifests"], *new]}
        told.put_manifest(compact(after), before.get("mediaType", INDEX_TYPE), tag)


def _documents(asked: Conversation, progress: Progress) -> Iterator[tuple[str, bytes]]:
    """The titles and bytes of documents that refer to the image, as somebody has put them.

    There may be several of a title, and none need be about the image. What somebody else's
    artifact lacks is told, or passed over, and hides no other.
    """
    for descriptor in islice(_ours(_listed(asked)), MOST):
        try:
            found = asked.document("manifests", descriptor.digest)
            artifact = _Artifact.model_validate(found.value)
            (layer,) = artifact.layers
            title = layer.annotations.get(TITLE, "")
            refers = artifact.subject.digest == asked.where.target
            if refers and TYPES.get(title) == artifact.artifactType:
                yield title, asked.blob(layer.digest)
        except ValidationError:
            continue  # of more than one file, say
        except EngineError as error:
            progress.note(f"  {error}")


def _listed(asked: Conversation) -> list[Any]:
    """The descriptors of what refers to the image: by the registry, or in the list by its tag.

    Registries that keep no such list answer in many ways.
    """
    found = None
    with suppress(EngineError):
        found = asked.index(f"referrers/{asked.where.target}")
    found = found or asked.index(f"manifests/{_list_of(asked)}")
    return list(found["manifests"]) if found else []


def _ours(entries: list[Any]) -> Iterator[_Descriptor]:
    """The entries of a list that are descriptors of our kinds of documents."""
    for entry in entries:
        with suppress(ValidationError):
            found = _Descriptor.model_validate(entry)
            if found.artifactType in TYPES.values():
                yield found
