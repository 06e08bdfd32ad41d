"""Layers compressed by zstd, each on its own.

What is packed is the same bytes on any machine: zstd makes them so with any number of threads
(https://github.com/facebook/zstd/blob/dev/lib/zstd.h, ZSTD_c_nbWorkers), and its version is locked.
Where Python has a zstd of its own, that may be another version, or one without threads, of which
other bytes come. They are one frame, whose header has the number of bytes in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import chain

from launcher.base.errors import UsageError
from launcher.base.zstd import zstd

LEVEL = 3  # zstd's own
MOST_THREADS = 8  # more than an engine's stream keeps busy
HEADER = 18  # a frame's header has no more bytes: RFC 8878, 3.1.1.1
ROOM = 1 << 16


def pack(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    """`size` bytes packed, in chunks of any length."""
    of = zstd.CompressionParameter
    threads = min(os.cpu_count() or 1, MOST_THREADS, of.nb_workers.bounds()[1])
    packer = zstd.ZstdCompressor(options={of.compression_level: LEVEL, of.nb_workers: threads})
    packer.set_pledged_input_size(size)
    for block in blocks:
        yield packer.compress(block)
    yield packer.flush()


def unpack(digest: str, blocks: Iterator[bytes]) -> tuple[int, Iterator[bytes]]:
    """How many bytes are packed in `blocks`, those of the blob `digest`, and they.

    Raises UsageError, also while they come, for anything else than one whole frame of `pack`.
    """
    head = b""
    while len(head) < HEADER and (block := next(blocks, b"")):
        head += block
    try:
        size = zstd.get_frame_info(head).decompressed_size
    except zstd.ZstdError:
        raise _other(digest, "it doesn't begin as zstd does") from None
    if size is None:
        raise _other(digest, "its size isn't stated")
    return size, _unpacked(digest, size, chain([head], blocks))


def _unpacked(digest: str, size: int, blocks: Iterator[bytes]) -> Iterator[bytes]:
    unpacker = zstd.ZstdDecompressor()
    for block in blocks:
        given = block
        while given or not unpacker.needs_input:
            try:
                found = unpacker.decompress(given, ROOM)
            except (zstd.ZstdError, EOFError) as error:
                raise _other(digest, error) from error
            size -= len(found)
            if found:
                yield found
            if unpacker.eof:
                break
            given = b""
    if size or not unpacker.eof or unpacker.unused_data:
        raise _other(digest, "it doesn't end where it should")


def _other(digest: str, why: object) -> UsageError:
    return UsageError(
        f"{digest}: a layer that isn't as `image save` packs it: {why}",
        "Save the image again, to a new folder.",
    )
