"""Blobs as files of limited size: written aside and put in their place, read as they are listed."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from launcher import files
from launcher.oci import layout, packed
from launcher.oci.layout import Blob, File

BLOCK = 1 << 16
"""Bytes that are read at once: new pages for a larger block cost more than its copy."""
NEW = os.O_RDWR | os.O_CREAT | os.O_TRUNC
Seen = Callable[[int], None]


class Stream:
    """Chunks of any length as a file to read from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = filter(None, chunks)
        self._chunk, self._at = b"", 0

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        if self._at >= len(self._chunk):
            self._chunk, self._at = next(self._chunks, b""), 0
        return not self._chunk

    def read(self, size: int) -> bytes:
        """What comes next, as much of one chunk as `size` allows; nothing at the end."""
        if self.ended:
            return b""
        start, self._at = self._at, self._at + size
        return self._chunk[start : self._at]


def write_blob(
    source: IO[bytes],
    size: int,
    folder: Path,
    aside: Path,
    part_size: int,
    packing: str | None,
    seen: Seen = lambda _: None,
) -> Blob:
    """Read `size` bytes of a blob into files of `part_size` bytes of the layout in `folder`.

    aside: a folder of ours on the same disk, where they are until all of them are written
    packing: how the media type tells that a layer comes packed, "" for one that isn't a layer's;
    what is None is packed here
    """
    whole, content = hashlib.sha256(), hashlib.sha256()
    plain = blocks(source, size, seen)
    stored = Stream(plain if packing is not None else packed.pack(hashed(plain, content), size))
    pieces: list[Path] = []
    written: list[tuple[int, str]] = []
    while not pieces or not stored.ended:
        pieces.append(aside / f"{len(pieces) + 1:04d}")
        own = hashlib.sha256()
        with files.named(pieces[-1]), open(files.open_own(pieces[-1], NEW, 0o666), "wb") as file:
            while block := stored.read(part_size - file.tell()):
                own.update(block)
                whole.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written.append((file.tell(), own.hexdigest()))
    digest, unpacked = (f"sha256:{one.hexdigest()}" for one in (whole, content))
    placed = []
    for number, (piece, (length, own_sha256)) in enumerate(zip(pieces, written, strict=True), 1):
        path = layout.blob_path(digest, number if len(pieces) > 1 else None)
        files.real_folder((folder / path).parent, folder)
        piece.replace(folder / path)
        placed.append(File(path=path, size=length, sha256=own_sha256))
    return Blob(
        digest=digest,
        size=sum(size for size, _ in written),
        media_type=layout.LAYER_TYPE + ("+zstd" if packing is None else packing),
        unpacked=unpacked if packing is None else None,
        files=tuple(placed),
    )


def blocks(source: IO[bytes], size: int, seen: Seen) -> Iterator[bytes]:
    """Blocks of `size` bytes in all; `seen` is told how many at each. Raises EOFError."""
    for at in range(0, size, BLOCK):
        wanted = min(BLOCK, size - at)
        block = source.read(wanted)
        if len(block) != wanted:
            raise EOFError("the stream ended early")
        yield block
        seen(wanted)


def hashed(blocks: Iterable[bytes], sha256: hashlib._Hash) -> Iterator[bytes]:
    """The same blocks, each of which `sha256` is told."""
    for block in blocks:
        sha256.update(block)
        yield block


def read_listed(folder: Path, path: str, size: int, seen: Seen = lambda _: None) -> Iterator[bytes]:
    """The `size` bytes of a file in a folder that came from elsewhere; `seen` is told how many at
    each block.

    Raises OSError for one of another size, and as `files.open_foreign`.
    """
    with files.open_foreign(folder / path, folder) as file:
        actual = os.fstat(file.fileno()).st_size
        if actual != size:
            raise OSError(errno.EINVAL, f"it has {actual} bytes, and not {size}")
        while size and (block := file.read(min(size, BLOCK))):
            seen(len(block))
            yield block
            size -= len(block)


def blocks_of(file: IO[bytes]) -> Iterator[bytes]:
    """All that comes of a file, in blocks."""
    return iter(partial(file.read, BLOCK), b"")


def sha256_of(blocks: Iterable[bytes]) -> str:
    """The sha256 of what comes in blocks, in hex."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def sha256(folder: Path, file: File) -> str:
    """The sha256 of a listed file as it is now. Raises OSError as `read_listed`."""
    return sha256_of(read_listed(folder, file.path, file.size))


def is_whole(folder: Path, file: File) -> bool:
    """Whether a listed file is as it was written."""
    try:
        return sha256(folder, file) == file.sha256
    except OSError:
        return False


def read_small(folder: Path, path: str, most: int) -> bytes:
    """The bytes of a file in a folder that came from elsewhere. Raises OSError beyond `most`."""
    with files.open_foreign(folder / path, folder) as file:
        size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} at most are read")
    return b"".join(read_listed(folder, path, size))
