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

contents = st.binary(max_size=400)


def write(folder: Path, content: bytes, part_size: int, pack: bool = False) -> parts.Blob:
    return parts.write(io.BytesIO(content), len(content), folder, "name", part_size, pack)


@given(contents, st.integers(1, 500))
def test_what_is_written_comes_back_joined(content: bytes, part_size: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        blob = write(folder, content, part_size)
        assert blob.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"
        assert blob.unpacked is None
        assert blob.kept == 0
        files = blob.place(folder)
        assert b"".join(parts.joined([folder / file.path for file in files])) == content
        assert all(file.size <= part_size for file in files)
        for file in files:
            own = (folder / file.path).read_bytes()
            assert (len(own), hashlib.sha256(own).hexdigest()) == (file.size, file.sha256)
        assert sum(path.is_file() for path in folder.rglob("*")) == len(files)


@given(st.one_of(contents, contents.map(lambda some: some * 1000)), st.integers(1, 500))
def test_what_is_packed_comes_back_unpacked(content: bytes, part_size: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        blob = write(folder, content, part_size, pack=True)
        assert blob.unpacked == f"sha256:{hashlib.sha256(content).hexdigest()}"
        paths = [folder / file.path for file in blob.place(folder)]
        stored = b"".join(path.read_bytes() for path in paths)
        assert (blob.digest, blob.size) == (
            f"sha256:{hashlib.sha256(stored).hexdigest()}",
            len(stored),
        )
        size, blocks = packed.unpack(blob.digest, parts.joined(paths))
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


@given(contents, contents, st.integers(1, 500))
def test_whatever_an_earlier_attempt_left_the_result_is_the_same(
    content: bytes, before: bytes, part_size: int
) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write(folder, before, part_size)
        blob = write(folder, content, part_size)
        assert b"".join(parts.joined([piece.path for piece in blob.pieces])) == content


@given(st.binary(min_size=1, max_size=400), st.data(), st.integers(1, 500))
def test_the_beginning_that_is_right_is_kept(
    content: bytes, data: st.DataObject, part_size: int
) -> None:
    ended = data.draw(st.integers(0, len(content)))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        first = write(folder, content, part_size)
        for number, piece in enumerate(first.pieces):
            left = max(0, ended - number * part_size)
            piece.path.write_bytes(piece.path.read_bytes()[:left])
        again = write(folder, content, part_size)
        assert again.digest == first.digest
        whole = sum(
            piece.size
            for n, piece in enumerate(first.pieces)
            if ended >= n * part_size + piece.size
        )
        assert again.kept == whole


def test_a_part_that_is_right_is_not_touched(tmp_path: Path) -> None:
    write(tmp_path, b"0123456789", 4)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    (tmp_path / "name.0002").write_bytes(b"4x67")
    write(tmp_path, b"0123456789", 4)
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"name.0002"}


def test_a_full_disk_is_told_with_the_file() -> None:
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left on device") as caught,
    ):
        parts._write_all(file, Path("/dev/full"), b"x")
    assert caught.value.filename == "/dev/full"


def test_parts_that_are_too_many_make_room(tmp_path: Path) -> None:
    write(tmp_path, b"0123456789", 2)
    write(tmp_path, b"0123456789", 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"name.000{n}" for n in (1, 2, 3)]


@pytest.mark.parametrize("pack", [False, True])
def test_a_source_that_ends_early_is_refused(tmp_path: Path, pack: bool) -> None:
    with pytest.raises(EOFError):
        parts.write(io.BytesIO(b"abc"), 4, tmp_path, "name", 10, pack)
