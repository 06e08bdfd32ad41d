"""The .bin and .idx against the format's description, and against a hand-made file."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from launcher.data import indexed


def read(prefix: Path) -> list[list[int]]:
    """Decode both files by the format's description alone."""
    data, index = prefix.with_name("d.bin").read_bytes(), prefix.with_name("d.idx").read_bytes()
    version, code, sequences, starts = struct.unpack_from("<QBQQ", index, 9)
    assert (index[:9], version, starts) == (b"MMIDIDX\0\0", 1, sequences + 1)
    at = 9 + struct.calcsize("<QBQQ")
    lengths = struct.unpack_from(f"<{sequences}i", index, at)
    offsets = struct.unpack_from(f"<{sequences}q", index, at + 4 * sequences)
    documents = struct.unpack_from(f"<{starts}q", index, at + 12 * sequences)
    assert documents == tuple(range(starts))
    assert len(index) == at + 12 * sequences + 8 * starts
    letter = {8: "H", 4: "i"}[code]
    return [
        list(struct.unpack_from(f"<{n}{letter}", data, o))
        for n, o in zip(lengths, offsets, strict=True)
    ]


@pytest.mark.parametrize(("vocabulary", "size"), [(257, 2), (65499, 2), (65500, 4), (100000, 4)])
def test_the_token_width_follows_the_vocabulary(tmp_path: Path, vocabulary: int, size: int) -> None:
    assert indexed.write(tmp_path / "d", [[1, 2, 3], [4]], vocabulary) == 4
    assert (tmp_path / "d.bin").stat().st_size == 4 * size
    assert read(tmp_path / "d") == [[1, 2, 3], [4]]


@given(documents=st.lists(st.lists(st.integers(0, 65498), max_size=20), max_size=20))
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    prefix = tmp_path_factory.mktemp("data") / "d"
    indexed.write(prefix, documents, 65499)
    assert read(prefix) == documents


def test_nothing_half_written_keeps_the_name(tmp_path: Path) -> None:
    def documents():
        yield [1]
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError):
        indexed.write(tmp_path / "d", documents(), 257)
    assert list(tmp_path.iterdir()) == []


@given(documents=st.lists(st.lists(st.integers(0, 65498), max_size=20), min_size=1, max_size=20))
def test_what_is_written_is_found_whole(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    assume(any(documents))
    prefix = tmp_path_factory.mktemp("data") / "d"
    tokens = indexed.write(prefix, documents, 65499)
    assert indexed.check(prefix) == indexed.Index(len(documents), len(documents), tokens, 2)


@given(
    documents=st.lists(st.lists(st.integers(0, 65498), max_size=9), min_size=1, max_size=9),
    end=st.sampled_from([".idx", ".bin"]),
    at=st.integers(0, 400),
    put=st.binary(max_size=12),
    cut=st.integers(0, 12),
)
def test_damage_is_found_or_does_none(
    tmp_path_factory: pytest.TempPathFactory,
    documents: list[list[int]],
    end: str,
    at: int,
    put: bytes,
    cut: int,
) -> None:
    """Bytes are put in the place of others; what passes still reads, each sequence its length."""
    prefix = tmp_path_factory.mktemp("data") / "d"
    indexed.write(prefix, documents, 65499)
    file = prefix.with_name(f"d{end}")
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + put + whole[at + cut :])
    try:
        found = indexed.check(prefix)
    except indexed.Damaged:
        return
    index = prefix.with_name("d.idx").read_bytes()
    lengths = struct.unpack_from(f"<{found.sequences}i", index, 34)
    assert [length * found.token_bytes for length in lengths] == [2 * len(d) for d in documents]
    assert prefix.with_name("d.bin").stat().st_size == 2 * sum(map(len, documents))


def damaged(prefix: Path) -> str:
    with pytest.raises(indexed.Damaged) as caught:
        indexed.check(prefix)
    return str(caught.value)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """Three documents of 3, 1 and 2 tokens."""
    indexed.write(tmp_path / "d", [[1, 2, 3], [4], [5, 6]], 257)
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("at", "put", "problem"),
    [
        (0, b"X", "no index of Megatron's"),
        (9, b"\x02", "version 2, and Megatron reads 1"),
        (17, b"\x07", "type code 7"),
        (18, b"\x09", "102 bytes, and its 9 sequences need"),
        (34, b"\xff\xff\xff\xff", "sequence 0 of -1 tokens"),
        (46, b"\x02", "sequence 0 of 3 tokens at 2, not at 0"),
        (78, b"\x09", "documents aren't in order"),
        (94, b"\x02", "documents end at 2 of 3"),
    ],
)
def test_each_damage_has_its_name(written: Path, at: int, put: bytes, problem: str) -> None:
    file = written.with_name("d.idx")
    whole = file.read_bytes()
    file.write_bytes(whole[:at] + put + whole[at + len(put) :])
    assert problem in damaged(written)


def test_a_bin_cut_short_is_found(written: Path) -> None:
    os.truncate(written.with_name("d.bin"), 11)
    assert damaged(written).endswith("d.bin: 11 bytes, and its index ends at 12")


def test_a_large_index_is_known_by_its_ends(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "READ_WHOLE", 0)
    assert indexed.check(written) == indexed.Index(3, 3, None, 2)
    os.truncate(written.with_name("d.bin"), 10)
    assert "its index ends at 12" in damaged(written)


def test_nothing_is_no_data(tmp_path: Path) -> None:
    indexed.write(tmp_path / "d", [], 257)
    assert "no tokens" in damaged(tmp_path / "d")
    (tmp_path / "d.bin").write_bytes(b"12")
    assert "no sequences" in damaged(tmp_path / "d")
    (tmp_path / "d.idx").write_bytes(b"")
    assert "header alone" in damaged(tmp_path / "d")
    (tmp_path / "d.bin").unlink()
    with pytest.raises(FileNotFoundError):
        indexed.check(tmp_path / "d")
