"""The documents of an image on this machine: <cache>/images/<ID in hex>/, written after a build."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import AliasPath, BaseModel, Field, ValidationError, model_validator

from launcher.base import files, owned
from launcher.base.errors import BuildError, UsageError, first_fault
from launcher.base.settings import Settings

if TYPE_CHECKING:
    from docker import DockerClient

    from launcher.images.builder.attest import ImageRecord

PROVENANCE = "provenance.json"
SBOM = "sbom.cdx.json"
PACKAGES = "packages.json"
NAMES = (PROVENANCE, SBOM, PACKAGES)
RECORD = "/opt/megatron/build.json"
LARGEST = 4 << 20
"""Bytes of a build.json and what a tar has around it."""


Model = TypeVar("Model", bound=BaseModel)


def _at(*keys: str) -> Any:
    """A field that stands below these keys."""
    return Field(validation_alias=AliasPath(*keys))


class _Record(BaseModel):
    name: str = _at("wheel", "name")
    sha256: str = _at("wheel", "sha256")
    patches: dict[str, str]
    of_base: dict[str, str] = {}


class _Subject(BaseModel):
    sha256: str = _at("digest", "sha256")


class _Provenance(BaseModel):
    subject: list[_Subject]
    dependencies: list[dict[str, Any]] = _at("predicate", "buildDefinition", "resolvedDependencies")


class _Component(BaseModel):
    name: str
    purl: str = ""
    version: str = ""

    @model_validator(mode="after")
    def _check(self) -> _Component:
        if self.purl.startswith("pkg:pypi/"):
            from packaging.version import Version

            Version(self.version)  # its error is a ValueError
        return self


class _Sbom(BaseModel):
    image: str = _at("metadata", "component", "bom-ref")
    components: list[_Component]


class _Packages(BaseModel):
    image: str
    packages: dict[str, str]


@dataclass(frozen=True)
class ImageDocuments:
    """The documents beside an image; None for one that isn't there."""

    folder: Path
    provenance: dict[str, Any] | None
    sbom: dict[str, Any] | None


def folder(image: str, site: Settings) -> Path:
    """Where the documents of the image with this ID lie."""
    return site.cache / "images" / image.removeprefix("sha256:")


def write_documents(made: ImageRecord, packages: Mapping[str, str], site: Settings) -> None:
    """Write provenance, SBOM and all `packages` of an image beside it, each whole or not at all."""
    from launcher.images.builder.attest import provenance
    from launcher.images.builder.sbom import sbom

    statement = json.dumps(provenance(made), indent=2, sort_keys=True) + "\n"
    listed = json.dumps({"image": made.id, "packages": packages}, indent=2, sort_keys=True) + "\n"
    documents = (statement, sbom(made), listed)
    put({name: text.encode() for name, text in zip(NAMES, documents, strict=True)}, made.id, site)


def put(documents: Mapping[str, bytes], image: str, site: Settings) -> None:
    """Put documents beside the image with this ID; those of other names aren't ours."""
    at = folder(image, site)
    at.parent.mkdir(parents=True, exist_ok=True)
    for name in {*NAMES} & documents.keys():
        with suppress(FileExistsError):
            owned.make_folder(at)
        files.write(at / name, documents[name])


def texts(image: str, site: Settings) -> dict[str, bytes]:
    """The documents beside the image with this ID, by name, as they are."""
    paths = [folder(image, site) / name for name in NAMES]
    return {path.name: path.read_bytes() for path in paths if path.is_file()}


def remove(image: str, site: Settings) -> None:
    """Remove what lies beside the image with this ID, if it can be removed."""
    with suppress(OSError):
        owned.remove_folder(folder(image, site), site.cache)


def is_kept(image: str, site: Settings) -> bool:
    """True where all documents lie beside the image with this ID."""
    return all((folder(image, site) / name).is_file() for name in NAMES)


def packages(image: str, site: Settings) -> dict[str, str] | None:
    """An image's Python packages: versions by normalised names, None where they aren't known."""
    try:
        text = files.read_regular(folder(image, site) / PACKAGES, LARGEST)
        found = _fitting(_Packages, _parsed(text), PACKAGES)
    except (OSError, ValueError):
        return None
    return found.packages if found.image == image else None


def kept(image: str, site: Settings) -> ImageDocuments:
    """The documents of the image with this ID. Raises BuildError for one that is no JSON."""
    at, found = folder(image, site), {}
    for name, content in texts(image, site).items():
        try:
            found[name] = _parsed(content)
        except ValueError as error:
            raise _spoilt(at / name, str(error)) from error
    return ImageDocuments(at, found.get(PROVENANCE), found.get(SBOM))


def check_documents(documents: ImageDocuments, image: str, record: dict[str, Any]) -> None:
    """Raise BuildError where a document is about another image than the one with this ID.

    `record` is the image's build.json, which has the sha256 of its wheel.
    """
    for name, document in ((PROVENANCE, documents.provenance), (SBOM, documents.sbom)):
        try:
            if document is not None:
                _check(name, document, image, record)
        except ValueError as error:
            raise _spoilt(documents.folder, str(error)) from error


def accept(found: Mapping[str, bytes], image: str, record: dict[str, Any], site: Settings) -> None:
    """Put documents that came with an image beside it, those by their names that are about it.

    `record` as for `check_documents`. What lies there stays: this machine may have built it.
    """
    there, accepted = texts(image, site), dict[str, bytes]()
    for name in {*NAMES} & found.keys() - there.keys():
        with suppress(ValueError):
            _check(name, _parsed(found[name]), image, record)
            accepted[name] = found[name]
    put(accepted, image, site)


def _check(name: str, document: object, image: str, record: dict[str, Any]) -> None:
    """Raises ValueError where a document is about another image, or about none."""
    if name != PROVENANCE:
        model: type[_Sbom | _Packages] = _Sbom if name == SBOM else _Packages
        if _fitting(model, document, name).image != image:
            raise ValueError(f"{name} is about another image")
        return
    digests = {subject.sha256 for subject in _fitting(_Provenance, document, name).subject}
    if digests != {image.removeprefix("sha256:"), record["wheel"]["sha256"]}:
        raise ValueError(f"{name} is about another image or wheel")


def _fitting(model: type[Model], document: object, name: str) -> Model:
    """Raises ValueError, in a line, for what doesn't fit."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{name}: {first_fault(error)}") from error


def record(client: DockerClient, image: str, name: str = "the image") -> dict[str, Any]:
    """build.json of an image, from a container that is never started; `name` is for messages.

    Raises UsageError where the image has none, or something else there: the launcher didn't
    build it.
    """
    from launcher.images.oci.inspection import container_of, copy_out

    remedy = "It isn't an image that `launcher image build` made."
    text = io.BytesIO()
    try:
        with container_of(client, image) as container:
            there = copy_out(container, RECORD, text, LARGEST)
        found = _parsed(text.getvalue()) if there else {}
        if there:
            _fitting(_Record, found, "build.json")
    except (ValueError, KeyError, tarfile.TarError) as error:
        raise UsageError(f"{name}: its {RECORD} is none of ours: {error}", remedy) from error
    if not there:
        raise UsageError(f"{name}: has no {RECORD}", remedy)
    return found


def _parsed(content: bytes) -> dict[str, Any]:
    """Raises ValueError for what is no document."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    return found


def _spoilt(path: Path, reason: str) -> BuildError:
    return BuildError(f"{path}: {reason}", "Remove it: the next `image build` writes it again.")
