"""Reads the tar streams in which engines give images: `docker save`."""

from __future__ import annotations

import io
import json
import posixpath
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, cast

from launcher.base.errors import EngineError
from launcher.images.oci.archive import MANIFEST, hex_of
from launcher.images.oci.blocks import BLOCK, ChunkStream
from launcher.images.oci.inspection import engine_errors
from launcher.images.oci.oci_layout import sha256

BLOB = re.compile(r"/layer\.tar$|^blobs/sha256/|^[0-9a-f]{64}\.(json|tar)$")


@dataclass(frozen=True)
class Member:
    """A blob in a stream of `docker save`: its name there, its bytes, and which one it is.

    diff_id: the layer that it is for certain, known before it is read, or None
    guess: the digest that it has in all likelihood, or None
    """

    name: str
    size: int
    diff_id: str | None = None
    guess: str | None = None


class SavedImage:
    """Reads what `docker save` writes, in either format, member by member.

    Up to version 24 a layer is `ID/layer.tar` beside `ID/json`; from 25 on it is
    `blobs/sha256/DIGEST`; Podman's is `DIFFID.tar`. All have a `manifest.json`, at the end, which
    says what is what.
    """

    def __init__(self, chunks: Iterator[bytes], diff_ids: Sequence[str]) -> None:
        self._tar = tarfile.open(  # noqa: SIM115 - a stream has nothing to close
            fileobj=cast(IO[bytes], ChunkStream(chunks)), mode="r|", bufsize=BLOCK
        )
        self._diff_ids = list(diff_ids)
        self._chains = chain_ids(diff_ids)
        self._legacy: dict[str, str | None] = {}
        self._links: dict[str, str] = {}
        self._manifest: list[dict[str, Any]] = []

    def members(self) -> Iterator[tuple[Member, io.BufferedReader]]:
        """Each blob with a file to read it from, before the next is asked for."""
        for entry in self._tar:
            self._tar.members.clear()  # type: ignore[attr-defined] # grows with every entry
            if entry.issym() or entry.islnk():
                beside = posixpath.dirname(entry.name) if entry.issym() else ""
                target = posixpath.normpath(posixpath.join(beside, entry.linkname))
                self._links[entry.name] = target
                continue
            file = self._tar.extractfile(entry) if entry.isreg() else None
            if file is None:
                continue
            if entry.name == MANIFEST:
                self._manifest = json.load(file)
            elif entry.name.endswith("/json"):
                self._legacy[posixpath.dirname(entry.name)] = self._layer_of(json.load(file))
            elif BLOB.search(entry.name):
                yield self._member(entry.name, entry.size), cast(io.BufferedReader, file)

    def config(self) -> str:
        """The name of the member that is the image's configuration."""
        return self._link(self._image()["Config"])

    def layers(self) -> list[str]:
        """The names of the members that are its layers, lowest first."""
        return [self._link(name) for name in self._image()["Layers"]]

    def _image(self) -> dict[str, Any]:
        if len(self._manifest) != 1:
            raise EOFError(f"the stream holds {len(self._manifest)} images")
        return self._manifest[0]

    def _link(self, name: str) -> str:
        seen = {name}
        while name in self._links and self._links[name] not in seen:
            name = self._links[name]
            seen.add(name)
        return name

    def _member(self, name: str, size: int) -> Member:
        if named := re.search(r"(?:^|/)([0-9a-f]{64})(?:\.tar|\.json)?$", name):
            digest = f"sha256:{named[1]}"
            return Member(name, size, digest if digest in self._diff_ids else None, digest)
        diff_id = self._legacy.get(posixpath.dirname(name))
        return Member(name, size, diff_id, diff_id or self._diff_ids[-1])

    def _layer_of(self, legacy: Mapping[str, Any]) -> str | None:
        """The layer that a legacy `ID/json` stands for, or None for the top one.

        The ID is a sha256 over the layer's chain ID and the file, but for the top one, whose file
        has the image's configuration (moby/moby, image/v1/imagev1.go, CreateID).
        """
        for diff_id, chain in zip(self._diff_ids, self._chains, strict=True):
            if legacy_id(legacy, chain) == legacy.get("id"):
                return diff_id
        return None


@contextmanager
def stream_errors(name: str, remedy: str) -> Iterator[None]:
    """Raise EngineError with `remedy` for an engine's image stream that is short or wrong."""
    try:
        yield
    except engine_errors(EOFError, tarfile.TarError, ValueError, KeyError) as error:
        raise EngineError(
            f"{name}: the engine ended its stream early, or it isn't an image's: {error}", remedy
        ) from error


def legacy_id(legacy: Mapping[str, Any], chain: str) -> str:
    """The legacy ID (hex) of a layer with this chain ID: its keys are sorted, theirs are not."""
    value = {key: legacy[key] for key in legacy if key not in ("id", "parent", "os")}
    value["layer_id"] = chain
    if legacy.get("parent"):
        value["parent"] = f"sha256:{legacy['parent']}"
    text = json.dumps(dict(sorted(value.items())), separators=(",", ":"))
    return hex_of(sha256(text.encode()))


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Of each layer, the ID of it and all below it.

    https://github.com/opencontainers/image-spec/blob/main/config.md#layer-chainid
    """
    chains: list[str] = []
    for diff_id in diff_ids:
        below = f"{chains[-1]} " if chains else ""
        chains.append(sha256((below + diff_id).encode()) if below else diff_id)
    return chains
