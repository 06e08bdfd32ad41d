"""The list of a layout's files: the same text for the same image, and no byte of it may change."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.oci import layout
from launcher.oci.layout import Base, File, Listing

A, B, C = (hashlib.sha256(text).hexdigest() for text in (b"a", b"b", b"c"))
LISTING = Listing(
    format=1,
    names=("megatron:24.10",),
    image=f"sha256:{A}",
    manifest=f"sha256:{B}",
    base=Base(name="base:1", id=f"sha256:{C}", digests=(), layers=(f"sha256:{C}",)),
    files=(
        File(path=f"blobs/sha256/{A}", size=1, sha256=A),
        File(path=f"parts/{B}.0001", size=1, sha256=C),
        File(path=f"parts/{B}.0002", size=1, sha256=A),
    ),
    split={f"sha256:{B}": (f"parts/{B}.0001", f"parts/{B}.0002")},
)
TEXT = layout.render(LISTING)


def test_it_is_read_as_it_was_written() -> None:
    assert layout.parse(TEXT, Listing) == LISTING
    assert layout.render(LISTING) == TEXT


@given(st.integers(0, len(TEXT) - 1), st.integers(1, 255))
def test_no_byte_of_it_can_be_another(place: int, flipped: int) -> None:
    changed = bytearray(TEXT)
    changed[place] ^= flipped
    assert layout.parse(bytes(changed), Listing) is None


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "blobs/sha256/x", f"parts/{A}", "a\nb"])
def test_a_file_outside_of_the_layout_is_refused(path: str) -> None:
    with pytest.raises(ValidationError):
        File(path=path, size=1, sha256=A)
    wrong = LISTING.model_dump() | {"files": [File(path=f"blobs/sha256/{A}", size=1, sha256=B)]}
    with pytest.raises(ValidationError, match="its name isn't its sha256"):
        Listing.model_validate(wrong)


def test_sums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    for file, content in zip(LISTING.files, (b"a", b"c", b"a"), strict=True):
        target = tmp_path / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    (tmp_path / layout.LISTING).write_bytes(TEXT)
    (tmp_path / layout.SUMS).write_bytes(layout.sums(LISTING))
    check = ["sha256sum", "--check", "--strict", layout.SUMS]
    assert subprocess.run(check, cwd=tmp_path, check=False).returncode == 0
