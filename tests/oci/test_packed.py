"""Packed layers: the same bytes from every machine, in a form that zstd itself reads."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator

import pytest

from launcher.errors import UsageError
from launcher.oci import packed
from launcher.zstd import zstd

DIGEST = f"sha256:{'1' * 64}"
SIZE = 20_000_000  # more than a thread takes at once: 8 MiB at level 3


@pytest.fixture(scope="module")
def content() -> bytes:
    """Words in no order: it packs, and no two places in it are alike."""
    dice = random.Random(1)  # noqa: S311 - no secret
    words = [dice.randbytes(5) for _ in range(2000)]
    return b"".join(dice.choices(words, k=SIZE // 5))


def blocks(content: bytes, length: int) -> Iterator[bytes]:
    return (content[at : at + length] for at in range(0, len(content), length))


def packed_by(
    content: bytes, monkeypatch: pytest.MonkeyPatch, cores: int | None, length: int
) -> str:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    sha256 = hashlib.sha256()
    for chunk in packed.pack(blocks(content, length), len(content)):
        sha256.update(chunk)
    return sha256.hexdigest()


def test_it_is_the_same_with_any_number_of_cores(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {packed_by(content, monkeypatch, cores, 1 << 16) for cores in (None, 1, 2, 3, 8, 200)}
    found.add(packed_by(content, monkeypatch, 2, 1_000_003))
    assert len(found) == 1


def without_size(content: bytes) -> bytes:
    """A frame that doesn't tell how much is in it, as of a stream."""
    packer = zstd.ZstdCompressor()
    return packer.compress(content) + packer.flush()


@pytest.mark.skipif(shutil.which("zstd") is None, reason="there is no program zstd here")
def test_zstd_itself_reads_it(content: bytes) -> None:
    """Its program, which says how many bytes the frame has, too."""
    stored = b"".join(packed.pack(blocks(content, 1 << 16), len(content)))
    assert len(stored) < len(content) / 2
    unpacked = subprocess.run(["zstd", "-dc"], input=stored, capture_output=True, check=True)
    assert unpacked.stdout == content
    size, again = packed.unpack(DIGEST, blocks(stored, 7_919))
    assert (size, b"".join(again)) == (SIZE, content)


def test_memory_is_bounded_where_much_comes_of_little() -> None:
    zeros = bytes(SIZE)
    stored = b"".join(packed.pack(blocks(zeros, 1 << 16), SIZE))
    assert len(stored) < SIZE / 1000
    _, again = packed.unpack(DIGEST, iter([stored]))
    assert max(map(len, again)) <= packed.ROOM


@pytest.mark.parametrize(
    "damage",
    [
        lambda stored: b"",
        lambda stored: stored[:3],
        lambda stored: b"no zstd" * 10,
        lambda stored: stored[:-1],
        lambda stored: stored + b"more",
        lambda stored: stored + stored,
        lambda stored: stored[:4] + bytes([stored[4] ^ 255]) + stored[5:],
        lambda stored: without_size(b"1"),
    ],
)
@pytest.mark.parametrize("length", [1, 5, 1 << 16])
def test_what_is_not_one_whole_frame_is_told(damage: Callable[[bytes], bytes], length: int) -> None:
    content = hashlib.shake_128(b"").digest(1000) + bytes(200_000)
    stored = b"".join(packed.pack(blocks(content, 1 << 16), len(content)))
    with pytest.raises(UsageError, match=f"{DIGEST}: a layer that isn't as `image save` packs it"):
        assert content != b"".join(packed.unpack(DIGEST, blocks(damage(stored), length))[1])
