"""Blobs in parts: any content comes back, and what is there already isn't written."""

from __future__ import annotations

import hashlib
import io
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.oci import packed, parts
from launcher.oci.layout import Blob

contents = st.binary(max_size=400)


def write(folder: Path, content: bytes, part_size: int, pack: bool = False) -> Blob:
    packing = None if pack else ""
    (folder / "aside").mkdir(exist_ok=True)
    source = io.BytesIO(content)
    return parts.write_blob(source, len(content), folder, folder / "aside", part_size, packing)


def read(folder: Path, blob: Blob) -> bytes:
    return b"".join(parts.read_small(folder, file.path, file.size) for file in blob.files)


@given(contents, st.integers(1, 500), contents)
def test_what_is_written_comes_back_joined(content: bytes, part_size: int, left: bytes) -> None:
    """Also where a save that was killed has left something aside."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "aside").mkdir()
        (folder / "aside/0001").write_bytes(left)
        blob = write(folder, content, part_size)
        assert blob.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert blob.unpacked is None
        assert (read(folder, blob), blob.size) == (content, len(content))
        assert all(file.size <= part_size for file in blob.files)
        assert all(parts.sha256(folder, file) == file.sha256 for file in blob.files)
        assert sum(path.is_file() for path in folder.rglob("*")) == len(blob.files)


@given(st.one_of(contents, contents.map(lambda some: some * 1000)), st.integers(1, 500))
def test_what_is_packed_comes_back_unpacked(content: bytes, part_size: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        blob = write(folder, content, part_size, pack=True)
        assert blob.unpacked == f"sha256:{hashlib.sha256(content).hexdigest()}"
        stored = read(folder, blob)
        assert blob.digest == f"sha256:{hashlib.sha256(stored).hexdigest()}"
        size, blocks = packed.unpack(blob.digest, iter([stored]))
        assert (size, b"".join(blocks)) == (len(content), content)


@given(st.lists(st.binary(max_size=5), max_size=20), st.lists(st.integers(1, 7), max_size=100))
def test_a_stream_gives_what_its_chunks_are(chunks: list[bytes], sizes: list[int]) -> None:
    stream = parts.Stream(iter(chunks))
    found = [stream.read(size) for size in sizes]
    assert all(len(block) <= size for block, size in zip(found, sizes, strict=True))
    assert not stream.read(0)
    while not stream.ended:
        found.append(stream.read(3))
    assert b"".join(found) == b"".join(chunks)
    assert not stream.read(1)


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left on device") as caught, parts.named("x"):
        Path("/dev/full").write_bytes(b"x")
    assert caught.value.filename == "x"
