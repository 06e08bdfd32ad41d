"""Reads streams and files in blocks, and hashes them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from launcher.base import files
from launcher.images.oci.oci_layout import LayoutFile

BLOCK = 1 << 16
"""Bytes that are read at once: new pages for a larger block cost more than its copy."""
Seen = Callable[[int], None]


class ChunkStream:
    """Chunks of any length as a file to read from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = filter(None, chunks)
        self._chunk, self._at = b"", 0

    def read(self, size: int) -> bytes:
        """What comes next, as much of one chunk as `size` allows; nothing at the end."""
        if self._at >= len(self._chunk):
            self._chunk, self._at = next(self._chunks, b""), 0
        start, self._at = self._at, self._at + size
        return self._chunk[start : self._at]


def taken(source: IO[bytes], size: int, seen: Seen) -> Iterator[bytes]:
    """The next `size` bytes, each block's count to `seen`. EOFError: there are fewer."""
    for at in range(0, size, BLOCK):
        wanted = min(BLOCK, size - at)
        block = source.read(wanted)
        if len(block) != wanted:
            raise EOFError("the stream ended early")
        yield block
        seen(wanted)


def hashed(blocks: Iterable[bytes], sha256: hashlib._Hash) -> Iterator[bytes]:
    """The same blocks, each of which is added to `sha256`."""
    for block in blocks:
        sha256.update(block)
        yield block


def read_listed(folder: Path, path: str, size: int, seen: Seen = lambda _: None) -> Iterator[bytes]:
    """The `size` bytes of a file in a folder from elsewhere; `seen` gets the bytes of each block.

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


def sha256(folder: Path, file: LayoutFile) -> str:
    """The sha256 of a listed file as it is now. Raises OSError as `read_listed`."""
    return sha256_of(read_listed(folder, file.path, file.size))


def is_whole(folder: Path, file: LayoutFile) -> bool:
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
