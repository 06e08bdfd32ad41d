"""The .bin and .idx against the format's description, and against a hand-made file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launcher.data import indexed
from tests.data.conftest import documents as documents_of


def read(prefix: Path) -> list[list[int]]:
    """Each document's one sequence."""
    return [sequence for (sequence,) in documents_of(prefix)]


@pytest.mark.parametrize(("vocabulary", "size"), [(257, 2), (65499, 2), (65500, 4), (100000, 4)])
def test_the_token_width_follows_the_vocabulary(tmp_path: Path, vocabulary: int, size: int) -> None:
    found = [[1, 2, vocabulary - 1], [4], []]
    assert indexed.write(tmp_path / "d", found, vocabulary) == 4
    assert (tmp_path / "d.bin").stat().st_size == 4 * size
    assert read(tmp_path / "d") == found
    code = {2: indexed.UINT16_CODE}.get(size, indexed.read_index(tmp_path / "d").code)
    assert indexed.read_index(tmp_path / "d") == indexed.Index(3, 3, 4, code)


def damaged(prefix: Path) -> str:
    with pytest.raises(indexed.Damaged) as caught:
        indexed.read_filled_index(prefix)
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
        (94, b"\x02", "documents end at 2 of 3"),
        (None, b"", "d.bin: 11 bytes, and its index ends at 12"),
    ],
)
def test_each_damage_has_its_name(written: Path, at: int | None, put: bytes, problem: str) -> None:
    file = written.with_name("d.idx")
    whole = file.read_bytes()
    if at is None:
        os.truncate(written.with_name("d.bin"), 11)
    else:
        file.write_bytes(whole[:at] + put + whole[at + len(put) :])
    assert problem in damaged(written)


def test_nothing_is_no_data(tmp_path: Path) -> None:
    indexed.write(tmp_path / "d", [], 257)
    assert "no tokens" in damaged(tmp_path / "d")
    (tmp_path / "d.idx").write_bytes(b"")
    assert "header alone" in damaged(tmp_path / "d")
    (tmp_path / "d.bin").unlink()
    with pytest.raises(FileNotFoundError):
        indexed.read_filled_index(tmp_path / "d")
