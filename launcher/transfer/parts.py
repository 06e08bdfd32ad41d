"""Blobs as files of limited size: written so that what is there already is kept, read joined."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher.transfer import layout
from launcher.transfer.layout import File

BLOCK = 1 << 16
"""Bytes that are read at once: more would be new pages for each block, at a cost above the copy's."""
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

    head: its first bytes, which tell how it is packed
    """

    digest: str
    size: int
    head: bytes
    pieces: tuple[Piece, ...]

    @property
    def kept(self) -> int:
        """Bytes that were there and weren't written."""
        return sum(piece.kept for piece in self.pieces)

    def place(self, folder: Path) -> list[File]:
        """Move its files to where the layout in `folder` has them."""
        files = []
        for number, piece in enumerate(self.pieces, 1):
            path = path_of(self.digest, number if len(self.pieces) > 1 else None)
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            piece.path.replace(target)
            files.append(File(path=path, size=piece.size, sha256=piece.sha256))
        return files


def path_of(digest: str, number: int | None) -> str:
    """Where a blob lies in a layout, or part `number` of it."""
    return layout.blob_path(digest) if number is None else layout.part_path(digest, number)


def write(
    source: IO[bytes],
    size: int,
    folder: Path,
    name: str,
    part_size: int,
    seen: Seen = lambda _: None,
) -> Blob:
    """Read `size` bytes into files of `part_size` bytes: `name`, or `name.0001` … if several.

    A file that is there is compared with what comes and written from the first byte that differs
    on, so that what an earlier, perhaps killed, attempt has written isn't written again.
    """
    count = max(1, -(-size // part_size))
    hashes = _Hashes()
    pieces = []
    with ThreadPoolExecutor(1) as thread:
        for number in range(1, count + 1):
            path = folder / (name if count == 1 else f"{name}.{number:04d}")
            room = min(part_size, size - part_size * (number - 1))
            own = hashes.begin(of_part=count > 1)
            kept = _write_piece(source, path, room, hashes, thread, seen)
            pieces.append(Piece(path, room, own.hexdigest(), kept))
    return Blob(f"sha256:{hashes.whole.hexdigest()}", size, hashes.head, tuple(pieces))


class _Hashes:
    """The sha256 of a blob, and of the part that is being written where it has several."""

    def __init__(self) -> None:
        self.whole = hashlib.sha256()
        self.head = b""
        self._updated = [self.whole]

    def begin(self, of_part: bool) -> hashlib._Hash:
        """The hash of the part that comes next; of a blob of one part, the blob's."""
        own = hashlib.sha256() if of_part else self.whole
        self._updated = [self.whole, own] if of_part else [self.whole]
        return own

    def update(self, block: bytes) -> None:
        self.head = (self.head + block[:4])[:4]
        for one in self._updated:
            one.update(block)


def _write_piece(
    source: IO[bytes], path: Path, room: int, hashes: _Hashes, thread: Executor, seen: Seen
) -> int:
    """Write `room` bytes to `path`, hashing each block while it is written; bytes kept."""
    kept, same = 0, True
    with path.open("r+b" if path.exists() else "w+b", buffering=0) as file:
        for at in range(0, room, BLOCK):
            block = _exactly(source, min(BLOCK, room - at))
            hashed: Future[None] = thread.submit(hashes.update, block)
            if same and _is_next(file, block):
                kept += len(block)
            else:
                if same:
                    file.seek(at)
                    file.truncate()
                    same = False
                _write_all(file, block)
            hashed.result()
            seen(len(block))
        if file.seek(0, os.SEEK_END) > room:
            file.truncate(room)
    return kept


def _is_next(file: IO[bytes], block: bytes) -> bool:
    """Whether a file goes on with these bytes; it doesn't where its disk can't be read."""
    try:
        return file.read(len(block)) == block
    except OSError:
        return False


def _exactly(source: IO[bytes], count: int) -> bytes:
    block = source.read(count)
    if len(block) != count:
        raise EOFError("the stream ended early")
    return block


def _write_all(file: IO[bytes], block: bytes) -> None:
    """A file without a buffer may take less than it is given, near the end of a disk."""
    rest = memoryview(block)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        error.filename = os.fspath(file.name)  # which disk is full
        raise


def joined(paths: Sequence[Path], seen: Seen = lambda _: None) -> Iterator[bytes]:
    """The bytes of files one after the other; `seen` is told how many at each block."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while block := file.read(BLOCK):
                seen(len(block))
                yield block
