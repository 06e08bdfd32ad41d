"""Blobs as files of limited size: written so that what is there already is kept, read joined."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher import files
from launcher.oci import layout, packed
from launcher.oci.layout import File

BLOCK = 1 << 16
"""Bytes that are read at once: new pages for a larger block cost more than its copy."""
Seen = Callable[[int], None]


@dataclass(frozen=True)
class Piece:
    """A file with some or all of a blob's bytes; `kept` of them were there and weren't written."""

    path: Path
    size: int
    sha256: str
    kept: int


@dataclass(frozen=True)
class Blob:
    """A blob that is complete, in pieces that aren't at their place yet.

    unpacked: the digest of what was packed, or None where the blob is what came
    """

    digest: str
    size: int
    unpacked: str | None
    pieces: tuple[Piece, ...]

    @property
    def kept(self) -> int:
        """Bytes that were there and weren't written."""
        return sum(piece.kept for piece in self.pieces)

    def place(self, folder: Path) -> list[File]:
        """Move its files to where the layout in `folder` has them."""
        placed = []
        for number, piece in enumerate(self.pieces, 1):
            path = path_of(self.digest, number if len(self.pieces) > 1 else None)
            target = folder / path
            files.real_folder(target.parent, folder)
            piece.path.replace(target)
            placed.append(File(path=path, size=piece.size, sha256=piece.sha256))
        return placed


def path_of(digest: str, number: int | None) -> str:
    """Where a blob lies in a layout, or part `number` of it."""
    return layout.blob_path(digest) if number is None else layout.part_path(digest, number)


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


def write(
    source: IO[bytes],
    size: int,
    folder: Path,
    name: str,
    part_size: int,
    pack: bool,
    seen: Seen = lambda _: None,
) -> Blob:
    """Read `size` bytes, and `pack` them or not, into files of `part_size` bytes: `name.0001` ….

    A file that is there is compared with what comes and written from the first block that differs
    on, so that what an earlier, perhaps killed, attempt has written isn't written again.
    """
    whole, content = hashlib.sha256(), hashlib.sha256()
    plain = _exactly(source, size, seen)
    stored = Stream(packed.pack(_hashed(plain, content), size) if pack else plain)
    pieces: list[Piece] = []
    while not pieces or not stored.ended:
        path = folder / f"{name}.{len(pieces) + 1:04d}"
        hashes = [whole, hashlib.sha256()] if pieces else [whole]
        pieces.append(_write_piece(stored, path, part_size, hashes))
    for surplus in {*folder.glob(f"{name}.*")} - {piece.path for piece in pieces}:
        files.remove_file(surplus, folder)
    digest, unpacked = (f"sha256:{one.hexdigest()}" for one in (whole, content))
    count = sum(piece.size for piece in pieces)
    return Blob(digest, count, unpacked if pack else None, tuple(pieces))


def _exactly(source: IO[bytes], size: int, seen: Seen) -> Iterator[bytes]:
    """Blocks of `size` bytes in all; `seen` is told how many at each."""
    for at in range(0, size, BLOCK):
        wanted = min(BLOCK, size - at)
        block = source.read(wanted)
        if len(block) != wanted:
            raise EOFError("the stream ended early")
        yield block
        seen(wanted)


def _hashed(blocks: Iterator[bytes], sha256: hashlib._Hash) -> Iterator[bytes]:
    for block in blocks:
        sha256.update(block)
        yield block


def _write_piece(stored: Stream, path: Path, room: int, hashes: Sequence[hashlib._Hash]) -> Piece:
    """Write at most `room` bytes to `path`; the last of `hashes` is the piece's at its end."""
    size, kept, same = 0, 0, True
    handle = files.open_own(path, os.O_RDWR | os.O_CREAT, 0o666)
    with open(handle, "r+b", buffering=0) as file:
        while block := stored.read(room - size):
            for sha256 in hashes:
                sha256.update(block)
            if same and _is_next(file, block):
                kept += len(block)
            else:
                if same:
                    file.seek(size)
                    file.truncate()
                    same = False
                _write_all(file, path, block)
            size += len(block)
        if file.seek(0, os.SEEK_END) > size:
            file.truncate(size)
        os.fsync(handle)
    return Piece(path, size, hashes[-1].hexdigest(), kept)


def _is_next(file: IO[bytes], block: bytes) -> bool:
    """Whether a file goes on with these bytes; it doesn't where its disk can't be read."""
    try:
        return file.read(len(block)) == block
    except OSError:
        return False


def _write_all(file: IO[bytes], path: Path, block: bytes) -> None:
    """A file without a buffer may take less than it is given, near the end of a disk."""
    rest = memoryview(block)
    with named(path):
        while rest:
            rest = rest[file.write(rest) :]


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    """An error of writing names the file, and with it which disk is full."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def joined(paths: Sequence[Path], seen: Seen = lambda _: None) -> Iterator[bytes]:
    """The bytes of files one after the other; `seen` is told how many at each block."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                seen(len(block))
                yield block


def listed(folder: Path, path: str, size: int, seen: Seen = lambda _: None) -> Iterator[bytes]:
    """The `size` bytes of a file in a folder that came from elsewhere; `seen` is as of `joined`.

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


def whole(folder: Path, path: str, most: int) -> bytes:
    """The bytes of a file in a folder that came from elsewhere. Raises OSError beyond `most`."""
    with files.open_foreign(folder / path, folder) as file:
        size = os.fstat(file.fileno()).st_size
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} at most are read")
    return b"".join(listed(folder, path, size))
