"""The .bin and .idx against the format's description, and against a hand-made file."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
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
