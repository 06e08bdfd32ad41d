"""Writes archives for `docker load`, entry by entry, and loads them into an engine.

The same input gives the same bytes: times are 0, and no image has a name in them.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from launcher.base.errors import EngineError
from launcher.images.oci.inspection import engine_errors
from launcher.images.oci.oci_layout import DIGEST, compact, sha256

if TYPE_CHECKING:
    from docker import DockerClient

MANIFEST = "manifest.json"


def layer_name(digest: str) -> str:
    """What the tar of a layer is called in an archive."""
    return f"{hex_of(digest)}/layer.tar"


def hex_of(digest: str) -> str:
    """A digest without its algorithm."""
    return digest.removeprefix("sha256:")


def archive(config: bytes, layers: Sequence[str], entries: Iterable[bytes] = ()) -> Iterator[bytes]:
    """An archive of one image, by its configuration and the names of its layers, lowest first.

    entries: those of the layers that the engine hasn't, one `entry` after the other
    """
    yield from entries
    name = f"{hex_of(sha256(config))}.json"
    manifest = compact([{"Config": name, "RepoTags": None, "Layers": list(layers)}])
    yield from entry(name, len(config), [config])
    yield from entry(MANIFEST, len(manifest), [manifest])
    yield bytes(2 * tarfile.BLOCKSIZE)


def entry(name: str, size: int, content: Iterable[bytes]) -> Iterator[bytes]:
    """A file of `size` bytes in a tar."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    yield member.tobuf(tarfile.GNU_FORMAT)
    yield from content
    yield bytes(-size % tarfile.BLOCKSIZE)


def load_archive(client: DockerClient, chunks: Iterator[bytes]) -> str:
    """The ID of an archive's one nameless image, as the engine loads it. Raises EngineError."""
    said = []
    try:
        for event in client.api.load_image(_unswallowed(chunks), quiet=True):
            if "error" in event:
                raise _refused(event["error"])
            said.append(str(event.get("stream", "")))
    except _ClosedPipe as error:
        raise BrokenPipeError(*error.args) from None
    except engine_errors() as error:
        raise _refused(getattr(error, "explanation", None) or error) from error
    named = re.search(rf"Loaded image(?: ID)?: ({DIGEST})", "".join(said))
    if named is None:
        raise EngineError(f"the engine doesn't report what it loaded: {''.join(said).strip()}")
    return named[1]


class _ClosedPipe(Exception):
    """A closed pipe, met where a request's body is made."""


def _unswallowed(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks. urllib3 takes a `BrokenPipeError` for the engine's, and waits for its answer."""
    try:
        yield from chunks
    except BrokenPipeError as error:
        raise _ClosedPipe(*error.args) from None


def _refused(reason: object) -> EngineError:
    full = "no space left" in str(reason)
    return EngineError(
        f"the engine refused the image: {reason}",
        "Free some of the engine's disk: docker system df." if full else "",
    )
