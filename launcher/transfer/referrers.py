"""Carries an image's documents through a registry, as artifacts that refer to the image.

They are what the OCI image and distribution specifications call referrers: each document has a
manifest of its own in the image's repository, with the image as its `subject`. Registries list
them by the image's digest. For one that doesn't, the specification has clients keep that list
themselves, under a tag made of the digest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from launcher.build import beside
from launcher.build.verify import is_ours
from launcher.engine.registry import INDEXES, Conversation, digest_of, media_type, talking
from launcher.errors import EngineError
from launcher.progress import Progress
from launcher.settings import Settings
from launcher.transfer.layout import MANIFEST_TYPE, Digest, compact
from launcher.transfer.remote import Carried, split

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


class _Descriptor(BaseModel):
    digest: Digest
    artifactType: str = ""
    annotations: dict[str, str] = {}


class _Artifact(BaseModel):
    artifactType: str
    subject: _Descriptor
    layers: tuple[_Descriptor]


class _Listing(BaseModel):
    manifests: tuple[_Descriptor, ...]


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
            subject = _subject(told)
            told.put_blob(EMPTY)
            unlisted = [_put(told, subject, *document) for document in known.items()]
            _list(told, [descriptor for descriptor in unlisted if descriptor])
    except EngineError as error:
        progress.note(f"  the registry has the image without its documents: {error}")
    else:
        progress.note(f"  with {', '.join(known)}")


def pull(client: DockerClient, pulled: Carried, site: Settings, progress: Progress) -> None:
    """Put beside a pulled image those of its documents in the registry that are about it.

    Of images that the launcher didn't build none are asked for.
    """
    if not is_ours(client.api.history(pulled.id)):
        return
    try:
        with _about(pulled) as asked:
            found = list(_documents(asked))
    except EngineError as error:
        progress.note(f"  the registry gives none of its documents: {error}")
        return
    record = beside.record(client, pulled.id, pulled.name)
    taken = beside.accept(found, pulled.id, record, site)
    progress.note(f"  with {', '.join(taken)}" if taken else "  without provenance or SBOM")


def _about(image: Carried) -> AbstractContextManager[Conversation]:
    return talking(f"{split(image.name)[0]}@{image.digest}")


def _subject(told: Conversation) -> dict[str, Any]:
    """The descriptor of the image's manifest."""
    digest = told.where.target
    content = told.content("manifests", digest)
    of_type = media_type(json.loads(content)) or MANIFEST_TYPE
    return {"mediaType": of_type, "digest": digest, "size": len(content)}


def _put(
    told: Conversation, subject: dict[str, Any], title: str, document: bytes
) -> dict[str, Any] | None:
    """Put a document that refers to `subject`; its descriptor, where the registry won't list it."""
    kind, named = {"artifactType": TYPES[title]}, {"annotations": {TITLE: title}}
    layer = _descriptor(TYPES[title], document) | named
    told.put_blob(document)
    content = compact(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": _descriptor(EMPTY_TYPE, EMPTY),
            "layers": [layer],
            "subject": subject,
            **kind,
            **named,
        }
    )
    answer = told.put_manifest(content, MANIFEST_TYPE, digest_of(content))
    listed = LISTED in answer.headers
    return None if listed else _descriptor(MANIFEST_TYPE, content) | kind | named


def _descriptor(of_type: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": of_type, "digest": digest_of(content), "size": len(content)}


def _tag(digest: str) -> str:
    """The tag of the list that clients keep: the distribution specification's referrers tag."""
    return digest.replace(":", "-")


def _list(told: Conversation, made: list[dict[str, Any]]) -> None:
    """Add to the list that clients keep what it lacks."""
    tag = _tag(told.where.target)
    before = (told.listing(f"manifests/{tag}") or {}).get("manifests", [])
    new = [descriptor for descriptor in made if descriptor not in before]
    if new:
        index = {"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [*before, *new]}
        told.put_manifest(compact(index), INDEX_TYPE, tag)


def _documents(asked: Conversation) -> Iterator[tuple[str, bytes]]:
    """The titles and bytes of documents that refer to the image, as somebody has put them.

    There may be several of a title, and none need be about the image.
    """
    digest = asked.where.target
    listing = asked.listing(f"referrers/{digest}") or asked.listing(f"manifests/{_tag(digest)}")
    try:
        listed = _Listing.model_validate(listing or {"manifests": []}).manifests
    except ValidationError as error:
        raise asked.wrong(f"lists no referrers for {digest}") from error
    for descriptor in [one for one in listed if one.artifactType in TYPES.values()][:MOST]:
        _, manifest = asked.document("manifests", descriptor.digest)
        try:
            artifact = _Artifact.model_validate(manifest)
        except ValidationError:
            continue  # another's, of more than one file
        (layer,) = artifact.layers
        title = layer.annotations.get(TITLE, "")
        if artifact.subject.digest == digest and TYPES.get(title) == artifact.artifactType:
            yield title, asked.content("blobs", layer.digest)
