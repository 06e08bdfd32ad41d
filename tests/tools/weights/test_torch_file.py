"""torch's files in all the ways that zip archives can be written: right, or refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launcher.base.errors import UsageError
from launcher.tools.weights import torch_file
from launcher.tools.weights.reader import Tensor, TensorBlock
from launcher.tools.weights.torch_file import StoredTensor

VALUES = np.arange(3000, dtype="u4")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of one tensor, beside a small one, as torch saves it."""
    tensors = {
        "a": torch_file.TensorToWrite("float32", (30, 100), VALUES.tobytes),
        "b": torch_file.TensorToWrite("int64", (1,), np.array([7]).tobytes),
    }
    with (tmp_path / "saved.pt").open("w+b") as file:
        torch_file.write(file, tensors)
    return tmp_path / "saved.pt"


def repacked(path: Path, kind: int = zipfile.ZIP_STORED, **changed: bytes) -> Path:
    """The same with entries written anew, some of them changed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_name("re"), "w", kind) as new:
        for name in old.namelist():
            content = changed.get(name.rpartition("/")[2], old.read(name))
            new.writestr(name, content)
    return path.with_name("re")


def read(path: Path) -> Any:
    return torch_file.read(path)["a"].read()


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_file_that_was_packed_anew_is_the_same(saved: Path, kind: int) -> None:
    """A deflated entry was read as if it were stored: garbage, and exit code 0."""
    assert np.array_equal(read(repacked(saved, kind)), VALUES.reshape(30, 100))


@pytest.mark.parametrize(
    ("kind", "changed", "said"),
    [
        (zipfile.ZIP_BZIP2, {}, "compressed in a way that torch doesn't read"),
        (zipfile.ZIP_LZMA, {}, "compressed in a way that torch doesn't read"),
        (zipfile.ZIP_STORED, {"byteorder": b"big"}, "another byte order"),
        (zipfile.ZIP_STORED, {"0": VALUES[:-1].tobytes()}, "cut short"),
        (zipfile.ZIP_DEFLATED, {"0": bytes(100_000_000)}, "becomes 100000000 bytes"),
    ],
    ids=["bzip2", "lzma", "byte order", "too short: the rest was what lies after it", "memory"],
)
def test_what_torch_would_not_read_so_is_refused(
    saved: Path, kind: int, changed: dict[str, bytes], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        read(repacked(saved, kind, **changed))


@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("where", range(20))
def test_a_byte_that_changed_is_found(saved: Path, kind: int, where: int) -> None:
    """The archive's checksums weren't compared."""
    path = repacked(saved, kind)
    with zipfile.ZipFile(path) as known:
        entry = known.getinfo(next(name for name in known.namelist() if name.endswith("data/0")))
    data = bytearray(path.read_bytes())
    start = entry.header_offset + 30 + len(entry.filename)
    data[start + where * (entry.compress_size // 20)] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(UsageError):
        read(path)


def test_without_checksums_as_torch_can_save_it_is_read(saved: Path) -> None:
    """`torch.serialization.set_crc32_options(False)` writes 0 for all of them."""
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as known:
        for entry in known.infolist():
            data = data.replace(entry.CRC.to_bytes(4, "little"), bytes(4))
    saved.write_bytes(data)
    assert np.array_equal(read(saved), VALUES.reshape(30, 100))


@pytest.mark.parametrize(
    ("places", "said"),
    [
        ([(0, 2), (2, 2)], None),
        ([(0, 2), (1, 2)], "overlap"),
        ([(0, 2), (0, 2)], "overlap"),
        ([(0, 1), (2, 2)], "aren't there"),
        ([(0, 2), (3, 2)], "outside"),
        ([(0, 2), (-1, 2)], "outside"),
        ([], "aren't there"),
    ],
)
def test_pieces_cover_a_tensor_once(
    tmp_path: Path, places: list[tuple[int, int]], said: str | None
) -> None:
    """Their sizes alone were added up: overlapping ones left memory unwritten."""
    (path := tmp_path / "x").write_bytes(VALUES.tobytes())
    pieces = tuple(
        TensorBlock(
            (at, 0), (n, 3), path, 0, 0, StoredTensor(path, 12 * at % 60, "float32", (n, 3))
        )
        for at, n in places
    )
    tensor = Tensor("float32", (4, 3), pieces)
    if said is None:
        assert np.array_equal(tensor.read(), VALUES[:12].reshape(4, 3))
        return
    with pytest.raises(UsageError, match=said):
        tensor.read()
