"""Reads compressed files, and reports one that ends too early."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable
from functools import partial
from typing import IO, Any

from launcher.base.zstd import zstd

MAGIC = {
    "gz": rb"\x1f\x8b",
    "zst": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",  # the second: a frame to be skipped
    "bz2": rb"BZh[1-9](1AY&|\x17rE8)",  # a block, or the end of none
    "xz": rb"\xfd7zXZ\x00",
}
"""What packed files begin with, in the first eight bytes."""
WINDOW = 31
"""The largest window of zstd, as a power of two: 2 GB of memory, where a file was made with it."""
PIECE = 1 << 20


class DamagedFile(Exception):
    """A compressed file that is cut short or damaged; the text says how."""


def packing(beginning: bytes) -> str | None:
    """What a file is compressed with, by its first bytes."""
    return next((name for name, magic in MAGIC.items() if re.match(magic, beginning)), None)


def unpacked(file: io.BufferedReader) -> io.BufferedReader:
    """The file, or what is packed in it; its reads raise DamagedFile where it has no proper end."""
    name = packing(file.peek(8))
    return file if name is None else io.BufferedReader(_UnpackedInput(_opened(name, file)), PIECE)


def _opened(name: str, file: IO[bytes]) -> Any:
    if name == "gz":
        return gzip.GzipFile(fileobj=file)
    if name == "zst":
        # Its reader raises at a cut frame; that of the package zstandard takes it for whole.
        return zstd.ZstdFile(file, options={zstd.DecompressionParameter.window_log_max: WINDOW})
    if name == "bz2":
        return _Streams(file, bz2.BZ2Decompressor)
    return _Streams(file, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ))


class _Streams:
    """What is in one or more packed streams, each begun by `begin`; between them may be zeros.

    Python's own readers leave out what follows a stream and isn't one: all that is behind damage.
    """

    def __init__(self, file: IO[bytes], begin: Callable[[], Any]) -> None:
        self.file = file
        self.begin = begin
        self.stream = begin()
        self.packed = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; none at the end. Raises EOFError where a stream has no end."""
        found = b""
        while not found:
            if self.stream.eof and not self._next():
                break
            if self.stream.needs_input and not self.packed:
                self.packed = self.file.read(PIECE)
                if not self.packed:
                    raise EOFError("it ends in the middle")
            found = self.stream.decompress(self.packed, size)
            self.packed = b""
        return found

    def _next(self) -> bool:
        """Begin the next stream, if there is one."""
        packed = self.stream.unused_data
        while not (packed := packed.lstrip(b"\0")):
            if not (packed := self.file.read(PIECE)):
                return False
        self.stream, self.packed = self.begin(), packed
        return True


class _UnpackedInput(io.RawIOBase):
    """What is in a packed file, with one error for all that can be wrong with it."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self.file.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError) as error:
            raise DamagedFile(str(error)) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise DamagedFile(str(error)) from None
        buffer[: len(piece)] = piece
        return len(piece)
