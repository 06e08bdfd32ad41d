"""Reads compressed files to their end, and never past a missing end without saying so."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from typing import IO, Any, cast

MAGIC = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
PIECE = 1 << 20


class Unreadable(Exception):
    """A compressed file that is cut short or damaged; the text says how."""


def packing(beginning: bytes) -> str | None:
    """What a file is compressed with, by its first bytes."""
    return next((name for magic, name in MAGIC.items() if beginning.startswith(magic)), None)


def unpacked(file: io.BufferedReader) -> io.BufferedReader:
    """The file, or what is packed in it; its reads raise Unreadable where it has no proper end."""
    name = packing(file.peek(8))
    return file if name is None else io.BufferedReader(_Unpacked(_opened(name, file)), PIECE)


def _opened(name: str, file: IO[bytes]) -> Any:
    if name == "gz":
        return gzip.GzipFile(fileobj=file)
    if name == "zst":
        # Its reader raises at a cut frame; that of the package zstandard takes it for whole.
        from backports import zstd

        return zstd.ZstdFile(file)
    return {"bz2": bz2.BZ2File, "xz": lzma.LZMAFile}[name](file)


class _Unpacked(io.RawIOBase):
    """What is in a packed file, with one error for all that can be wrong with it."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            piece = self.file.read(len(buffer))
        except (EOFError, zlib.error, lzma.LZMAError) as error:
            raise Unreadable(str(error)) from None
        except OSError as error:
            if error.errno is not None:
                raise
            raise Unreadable(str(error)) from None
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise Unreadable(str(error)) from None
        buffer[: len(piece)] = piece
        return len(piece)


class Counted(io.RawIOBase):
    """Counts what is read of a file, which may be a pipe."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.count = 0

    def readable(self) -> bool:
        """It is there to be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read, and count."""
        count = cast("io.BufferedReader", self.file).readinto(buffer)
        self.count += count
        return count
