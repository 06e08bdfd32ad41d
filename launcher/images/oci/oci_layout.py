"""The format of a saved image: an OCI image layout, and a list of its files with their sha256.

The layout is that of https://github.com/opencontainers/image-spec/blob/main/image-layout.md. It
allows blobs to be missing: here those of the base (`--thin`). `documents/` has what lay beside the
image: its provenance and SBOM. `transfer.json` lists every file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from launcher.base import names

LISTING, SUMS, INDEX, MARKER = "transfer.json", "SHA256SUMS", "index.json", "oci-layout"
LAYOUT = b'{"imageLayoutVersion":"1.0.0"}'
"""What MARKER holds."""

BLOBS, DOCUMENTS = "blobs/sha256", "documents"

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"
UNPACKED = "containerd.io/uncompressed"  # as containerd annotates: a packed layer's diff ID
DIGEST = r"sha256:[0-9a-f]{64}"
PLACE = rf"{INDEX}|{MARKER}|{BLOBS}/[0-9a-f]{{64}}|{DOCUMENTS}/[a-z][a-z.]*"
LARGEST = 4 << 20
"""Bytes of a manifest, a configuration or a document, as of those at a registry."""
LARGEST_LISTING = 16 << 20
LARGEST_FILE = 1 << 38
MOST_NAMES = MOST_LAYERS = 1000
"""Engines take less than 130 of them."""


Digest = Annotated[str, AfterValidator(names.matching(DIGEST, "a digest"))]
Hash = Annotated[str, AfterValidator(names.matching(r"[0-9a-f]{64}", "a sha256"))]
Size = Annotated[int, Field(ge=0, le=LARGEST_FILE)]
Reference = Annotated[str, Field(max_length=512), AfterValidator(names.image)]
Name = Annotated[
    Reference, AfterValidator(names.matching(r"[^@]*:[^/@]+", "a name with a tag: a:1"))
]
Place = Annotated[str, AfterValidator(names.matching(PLACE, "a file of a layout"))]


class StrictLayout(BaseModel):
    """What takes no key that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LayoutFile(StrictLayout):
    """A file of the layout: its place in the folder, its bytes and their sha256."""

    path: Place
    size: Size
    sha256: Hash


class Blob(StrictLayout):
    """A blob: its digest and bytes, and how it is packed.

    unpacked: the digest of what was packed by us, such as a layer's diff ID
    """

    digest: Digest
    size: Size
    media_type: str = LAYER_TYPE
    unpacked: Digest | None = None

    @property
    def file(self) -> LayoutFile:
        """The file that holds it where it is carried."""
        digest = self.digest.removeprefix("sha256:")
        return LayoutFile(path=blob_path(self.digest), size=self.size, sha256=digest)

    def descriptor(self) -> dict[str, Any]:
        """What stands for it in a manifest."""
        described = {"mediaType": self.media_type, "digest": self.digest, "size": self.size}
        return described | ({"annotations": {UNPACKED: self.unpacked}} if self.unpacked else {})


class BaseImage(StrictLayout):
    """The image that a thin one needs on the other side.

    id: as the engine that saved it names it; digests: as registries do, if any;
    layers: diff IDs, lowest first
    """

    name: Reference
    id: Digest
    digests: tuple[Reference, ...]
    layers: Annotated[tuple[Digest, ...], Field(max_length=MOST_LAYERS)]


class FileList(StrictLayout):
    """A list of files, each once, as it is written beside them with its own sha256."""

    files: tuple[LayoutFile, ...]

    @model_validator(mode="after")
    def _check_files(self) -> FileList:
        if len(self.listed) != len(self.files):
            raise ValueError("a file is listed twice")
        return self

    @cached_property
    def listed(self) -> Mapping[str, LayoutFile]:
        """The files by their paths."""
        return {file.path: file for file in self.files}

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(file.size for file in self.files)


FilesT = TypeVar("FilesT", bound=FileList)


class Listing(FileList):
    """All that is in a saved image's folder.

    image: the sha256 of the image's configuration, which is its ID in most engines; manifest: the
    digest of the OCI manifest; base: of a thin image, what it leaves out; split: blobs in parts,
    of which there are none any more
    """

    format: Literal[1]
    names: Annotated[tuple[Name, ...], Field(max_length=MOST_NAMES)]
    image: Digest
    manifest: Digest
    base: BaseImage | None
    split: Annotated[dict[Digest, Place], Field(max_length=0)] = {}

    @model_validator(mode="after")
    def _check(self) -> Listing:
        for file in self.files:
            if file.path.startswith(f"{BLOBS}/") and not file.path.endswith(file.sha256):
                raise ValueError(f"{file.path}: its name isn't its sha256")
        return self

    def blob(self, digest: str) -> LayoutFile | None:
        """The file that holds a blob; None where it isn't carried."""
        return self.listed.get(blob_path(digest))


class Descriptor(BaseModel):
    """What a manifest says of a blob."""

    mediaType: str = LAYER_TYPE
    digest: Digest
    annotations: dict[str, str] = {}

    @property
    def unpacked(self) -> str | None:
        """The diff ID of a layer that was packed by us."""
        return self.annotations.get(UNPACKED)


class Manifest(BaseModel):
    """An OCI manifest, in what is read of it."""

    config: Descriptor
    layers: Annotated[tuple[Descriptor, ...], Field(max_length=MOST_LAYERS)]


class Config(BaseModel):
    """An image's configuration, in what is read of it: the diff IDs of its layers, lowest first."""

    diff_ids: Annotated[
        tuple[Digest, ...],
        Field(validation_alias=AliasPath("rootfs", "diff_ids"), max_length=MOST_LAYERS),
    ]


def blob_path(digest: str) -> str:
    """Where the blob of a digest lies in a layout."""
    return f"{BLOBS}/{digest.removeprefix('sha256:')}"


def sha256(content: bytes) -> str:
    """The digest of bytes that are in memory."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def compact(value: object) -> bytes:
    """JSON that is the same bytes for the same value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def descriptor_of(media_type: str, content: bytes) -> dict[str, Any]:
    """What stands for a blob in a manifest."""
    return {"mediaType": media_type, "digest": sha256(content), "size": len(content)}


def manifest(config: bytes, layers: Sequence[Blob]) -> bytes:
    """The OCI manifest of an image."""
    return compact(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": descriptor_of(CONFIG_TYPE, config),
            "layers": [layer.descriptor() for layer in layers],
        }
    )


def index(manifest: bytes, config: Mapping[str, Any], names: Sequence[str]) -> bytes:
    """The layout's index: the manifest once for each name, for tools that look images up by it."""
    platform = {key: config[key] for key in ("architecture", "os") if key in config}
    descriptor = descriptor_of(MANIFEST_TYPE, manifest) | {"platform": platform}
    named = [
        descriptor
        | {
            "annotations": {
                "io.containerd.image.name": name,
                "org.opencontainers.image.ref.name": name.rpartition(":")[2],
            }
        }
        for name in names
    ]
    return compact({"schemaVersion": 2, "manifests": named or [descriptor]})


def render(listing: FileList) -> bytes:
    """The text of a list of files; its `sha256` is that of the same text with an empty one."""
    return _signed(listing, hashlib.sha256(_signed(listing, "")).hexdigest())


def _signed(listing: FileList, own: str) -> bytes:
    value = listing.model_dump(mode="json") | {"sha256": own}
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def parse(text: bytes, model: type[FilesT]) -> FilesT | None:
    """The list of files that a text is, or None where a byte of it isn't as it was written."""
    try:
        value = json.loads(text)
        own = value.pop("sha256")
        listing = model.model_validate(value)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, ValidationError):
        return None
    return listing if render(listing) == text and own else None


def sums(listing: Listing) -> bytes:
    """The text of SHA256SUMS, for `sha256sum -c`."""
    hashes = {file.path: file.sha256 for file in listing.files}
    hashes[LISTING] = hashlib.sha256(render(listing)).hexdigest()
    return "".join(f"{hashes[path]}  {path}\n" for path in sorted(hashes)).encode()
