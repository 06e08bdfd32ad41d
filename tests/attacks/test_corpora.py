"""A hundred corrupt corpora: each is refused in words, or read as what it is.

Flipped, cut and foreign bytes in every format and packing, records without end, and packed files
that hold ten thousand times their size.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from launcher.base.errors import LauncherError
from launcher.base.zstd import zstd
from launcher.tools.data import tokenize
from launcher.tools.data.jsonl import convert
from launcher.tools.data.ledger import Leniency
from launcher.tools.data.sources import BLOCK, ReadingOptions
from launcher.tools.data.tokenize import TokenizeTask
from launcher.tools.data.tokenizers import TokenizerChoice
from tests.tools.data.conftest import documents, gpt2, loaded  # noqa: F401  # fixtures

from .conftest import TENS, bounded

TEXTS = [f'{number} Hello, 世界 "quoted"\n\tand more\u2028' * 9 for number in range(60)]
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
VERIFIED = {".gz", ".bz2", ".xz"}
"""Packings with checksums: what is damaged gives no other documents."""
FOREIGN = [b"\xff\xfe", b"\0" * 9, b"\r", b"\f\n", b'"', b"\xed\xa0\x80", b"\x1f\x8b", b"{" * 5000]


def jsonl() -> bytes:
    return "".join(json.dumps({"text": text, "id": 1}) + "\n" for text in TEXTS).encode()


def table(**dialect: str) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **dialect).writerows([["id", "text"], *([1, text] for text in TEXTS)])  # type: ignore[arg-type]
    return text.getvalue().encode()


def parquet() -> bytes:
    file = io.BytesIO()
    made = pyarrow.table({"text": TEXTS, "id": [*range(len(TEXTS))]})
    pyarrow.parquet.write_table(made, file, row_group_size=20, write_page_checksum=True)
    return file.getvalue()


WHOLE = {
    "in.jsonl": jsonl(),
    "in.csv": table(),
    "in.txt": "\n".join(TEXTS).encode(),
    "in.parquet": parquet(),
}


def flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 3, 50))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def inserted(content: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(content) + 1)
    return content[:at] + chance.choice([*FOREIGN, chance.randbytes(300)]) + content[at:]


def doubled(content: bytes, chance: random.Random) -> bytes:
    first, last = sorted(chance.randrange(len(content)) for _ in range(2))
    return content[:last] + content[first:]


SPOILS = (flipped, flipped, cut, inserted, doubled)


def damage(number: int, folder: Path) -> tuple[Path, ReadingOptions, bool]:
    """A corpus, how it is read, and whether nothing but its own documents may be in it."""
    chance = random.Random(13_000 + number)  # noqa: S311
    name = [*WHOLE][number % 4]
    packing = "" if name == "in.parquet" else chance.choice([*PACKED])
    spoil = chance.choice(SPOILS)
    within = bool(packing) and chance.random() < 0.3
    content = WHOLE[name]
    packed = PACKED[packing]
    spoiled = packed(spoil(content, chance)) if within else spoil(packed(content), chance)
    path = folder / f"{name}{packing}"
    path.write_bytes(spoiled)
    unit = chance.choice(("line", "paragraph", "file"))
    checked = packing in VERIFIED or name == "in.parquet"
    verified = checked and not within and spoil in (flipped, cut)
    return path, ReadingOptions(unit=unit, largest=BLOCK), verified


def told(path: Path, reading: ReadingOptions, leniency: Leniency) -> list[str] | None:
    """The documents that are made of it; None where that is refused, and then nothing is left."""
    target = path.with_name("out.jsonl")
    try:
        with bounded():
            convert([str(path)], target, reading, leniency, lambda done: None)
    except LauncherError as error:
        assert str(error)
        assert "Traceback" not in str(error)
        assert os.listdir(path.parent) == [path.name]
        return None
    found = [json.loads(line)["text"] for line in target.read_bytes().splitlines()]
    for made in path.parent.glob("out.*"):
        made.unlink()
    return found


@pytest.mark.parametrize("ten", TENS)
def test_a_damaged_corpus_is_refused_or_read(tmp_path: Path, ten: int) -> None:
    """And as strictly as can be: what is left out is only what was listed."""
    for number in range(10 * ten, 10 * ten + 10):
        folder = tmp_path / str(number)
        folder.mkdir()
        path, reading, verified = damage(number, folder)
        strict = told(path, reading, Leniency())
        lenient = told(path, reading, Leniency(skip=True))
        assert strict is None or strict == lenient, number
        if verified and strict is not None:
            name = f"in.{path.name.split('.')[1]}"
            path.write_bytes(PACKED[path.suffix if path.name != name else ""](WHOLE[name]))
            assert strict == told(path, reading, Leniency()), number


@pytest.mark.parametrize("seed", [754, 1326, 1427, 2480])
def test_a_damaged_description_of_parquets_columns_is_refused(tmp_path: Path, seed: int) -> None:
    """It has no checksum. Names that aren't UTF-8, an abort of Arrow's, groups that are gone."""
    path = tmp_path / "in.parquet"
    path.write_bytes(flipped(WHOLE["in.parquet"], random.Random(seed)))  # noqa: S311
    assert told(path, ReadingOptions(), Leniency()) is None


BOMBS = {
    "line.jsonl": b'{"text": "a"}\n{"text": "' + b"x" * (40 << 20),
    "deep.jsonl": b'{"text": ' + b"[" * (40 << 20),
    "number.jsonl": b'{"text": ' + b"9" * (1 << 20) + b"}\n",
    "zeros.jsonl": bytes(40 << 20),
    "cr.jsonl": b'{"text": "a"}\r' + b"\0" * (40 << 20) + b'\r{"text": "b"}',
    "field.csv": b'id,text\n1,"' + b"x" * (40 << 20),
    "rows.csv": b'id,text\n1,"' + b"a short line\n" * (3 << 20),
    "columns.csv": b"," * (3 << 20) + b"\n",
    "paragraph.txt": (b"a line" * 20 + b"\n") * (1 << 15) + b"x" * (8 << 20),
    "spaces.txt": b" " * (40 << 20),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_takes_no_more_than_a_record_may(tmp_path: Path, name: str) -> None:
    """Some kilobytes that are megabytes of one record."""
    path = tmp_path / f"{name}.gz"
    path.write_bytes(gzip.compress(BOMBS[name], 1))
    units = ("line", "paragraph", "file") if name.endswith(".txt") else ("line",)
    for unit in units:
        assert told(path, ReadingOptions(unit=unit, largest=BLOCK), Leniency()) is None
        told(path, ReadingOptions(unit=unit, largest=BLOCK), Leniency(skip=True))


def test_a_parquet_file_that_is_a_bomb(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    made = pyarrow.table({"text": ["a", "x" * (40 << 20)]})
    pyarrow.parquet.write_table(made, path, compression="zstd", row_group_size=1)
    assert told(path, ReadingOptions(largest=BLOCK), Leniency()) is None
    made = pyarrow.table({"text": pyarrow.array(["x" * 500_000] * 100).dictionary_encode()})
    pyarrow.parquet.write_table(made, path, compression="zstd")
    found = told(path, ReadingOptions(largest=BLOCK), Leniency())
    assert found is not None
    assert len(found) == 100


@pytest.mark.usefixtures("loaded")
@pytest.mark.parametrize("number", range(0, 100, 25))
def test_a_damaged_corpus_is_tokenized_or_refused(tmp_path: Path, number: int) -> None:
    """By workers too: a whole pair, or none."""
    path, reading, _ = damage(number, tmp_path)
    job = TokenizeTask(
        (str(path),), tmp_path / "out", reading, TokenizerChoice(), leniency=Leniency(skip=True)
    )
    try:
        with bounded():
            done = tokenize.run(job, lambda done: None)
    except LauncherError:
        assert os.listdir(tmp_path) == [path.name]
        return
    assert len(documents(tmp_path / "out_text_document")) == done.documents
