"""Reads the entries of an image's layers from a `docker save` stream, without unpacking them."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, cast

from launcher.base.errors import EngineError
from launcher.base.unpack import DamagedFile, unpacked
from launcher.images.oci.blocks import BLOCK, ChunkStream, blocks_of, hashed, sha256_of
from launcher.images.oci.saved import SavedImage

WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
EXTENDED = "SCHILY.xattr."
IN_FIELDS = {"path", "linkpath", "size", "mtime", "uid", "gid", "uname", "gname"}

KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.DIRTYPE: "folder",
    tarfile.SYMTYPE: "symbolic link",
    tarfile.LNKTYPE: "hard link",
    tarfile.CHRTYPE: "character device",
    tarfile.BLKTYPE: "block device",
    tarfile.FIFOTYPE: "pipe",
}


@dataclass(frozen=True)
class LayerEntry:
    """What a layer says of one path.

    kind: one of KINDS, or `removed` for what a layer takes away from those below it
    mode: permission bits, in octal; owner: uid:gid; size: bytes; mtime: seconds since 1970
    target: of a link, or a device's numbers; sha256: of a file's content, in hex
    attributes: the extended ones; header: the rest of its tar header: names, PAX records
    """

    kind: str
    mode: str
    owner: str
    size: int
    mtime: float
    target: str = ""
    sha256: str = ""
    attributes: tuple[tuple[str, str], ...] = ()
    header: tuple[tuple[str, str], ...] = ()


LayerEntries = tuple[tuple[str, LayerEntry], ...]
"""A layer's entries in their order, by absolute path."""


def read_layers(
    chunks: Iterator[bytes], diff_ids: Sequence[str], known: Collection[str]
) -> dict[str, LayerEntries]:
    """The layers in a stream of `docker save`, by diff ID, but for those that are `known`.

    diff_ids: the image's, lowest first. A known layer is passed over where the stream names it
    before it comes; else it is read like the others, packed or not. One that is packed as Python
    can't read it is left out. Raises EngineError where the stream isn't a whole image.
    """
    found: dict[str, LayerEntries] = {}
    try:
        for member, content in SavedImage(chunks, diff_ids).members():
            if member.diff_id in known or content.peek(1)[:1] == b"{":
                continue
            with suppress(tarfile.ReadError):  # packed as Python can't read it
                diff_id, layer = read_layer(content)
                found[diff_id] = layer
    except (tarfile.TarError, EOFError, DamagedFile, ValueError) as error:
        raise EngineError(f"what the engine saves of the image can't be read: {error}") from error
    return found


def read_layer(file: io.BufferedReader) -> tuple[str, LayerEntries]:
    """The diff ID and the entries of a layer's tar, which may be packed.

    Raises tarfile.ReadError for anything else, Unreadable where what is packed is damaged.
    """
    whole, entries = hashlib.sha256(), []
    stream = ChunkStream(hashed(blocks_of(unpacked(file)), whole))
    with tarfile.open(fileobj=cast(IO[bytes], stream), mode="r|", bufsize=BLOCK) as tar:
        for member in tar:
            content = tar.extractfile(member) if member.isreg() else None
            entries.append(_described(member, sha256_of(blocks_of(content)) if content else ""))
    while stream.read(BLOCK):  # what stands behind the tar's end is part of the layer
        pass
    return f"sha256:{whole.hexdigest()}", tuple(entries)


def _described(member: tarfile.TarInfo, sha256: str) -> tuple[str, LayerEntry]:
    """A tar header as path and Entry."""
    pax = {key: str(value) for key, value in member.pax_headers.items()}
    rest = {k: v for k, v in pax.items() if k not in IN_FIELDS and not k.startswith(EXTENDED)}
    attributes = {k.removeprefix(EXTENDED): v for k, v in pax.items() if k.startswith(EXTENDED)}
    devices = f"{member.devmajor}:{member.devminor}" if member.ischr() or member.isblk() else ""
    folder, _, name = f"/{member.name.removeprefix('./').strip('/')}".rpartition("/")
    gone = name.startswith(WHITEOUT) and name != OPAQUE
    return f"{folder}/{name.removeprefix(WHITEOUT) if gone else name}", LayerEntry(
        kind="removed" if gone else KINDS.get(member.type, f"type {member.type!r}"),
        mode=f"{member.mode & 0o7777:04o}",
        owner=f"{member.uid}:{member.gid}",
        size=member.size,
        mtime=member.mtime,
        target=member.linkname or devices,
        sha256=sha256,
        attributes=tuple(sorted(attributes.items())),
        header=tuple(sorted({**rest, "user": member.uname, "group": member.gname}.items())),
    )
