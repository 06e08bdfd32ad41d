"""Inputs of every kind give the same documents; a damaged one never gives fewer in silence."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from launcher.data import records, sources
from launcher.data.faults import DataError
from launcher.data.sources import Reading
from launcher.errors import UsageError

TEXTS = ["first, with a comma", 'second "quoted"\nof two lines', "", "第三 ", "x" * 5000]


def read(*inputs: Path | str, **how: object) -> list[list[str]]:
    """Each document's texts of the keys."""
    reading = Reading(**how)
    found: list[list[str]] = []
    for _, block in sources.blocks(sources.sources([*map(str, inputs)], reading), reading):
        read = records.documents(block, reading.keys, stop=True)
        assert read.faults == []
        assert all(set(counts) <= {1} for counts in read.counts)
        found += [list(row) for row in zip(*read.texts, strict=True)]
    return found


def faults(path: Path, **how: object) -> list[tuple[int, str]]:
    """Where and why there are no documents."""
    reading = Reading(**how)
    found = []
    for _, block in sources.blocks(sources.sources([str(path)], reading), reading):
        read = records.documents(block, reading.keys, stop=False)
        places = block.numbers or range(1, read.records + 1)
        found += [(places[fault.at], fault.reason) for fault in read.faults]
    return found


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("packing", PACK)
def test_packed_files(tmp_path: Path, packing: str) -> None:
    """Two frames one after the other, as `cat a.gz b.gz` makes them."""
    path = tmp_path / f"in.jsonl.{packing}"
    path.write_bytes(PACK[packing](jsonl(TEXTS)) + PACK[packing](jsonl(TEXTS)))
    assert read(path) == [[text] for text in TEXTS * 2]
    hidden = tmp_path / "in.jsonl"
    hidden.write_bytes(path.read_bytes())
    assert read(hidden) == [[text] for text in TEXTS * 2]


@pytest.mark.parametrize("packing", PACK)
def test_a_packed_file_cut_anywhere_is_never_taken_for_whole(tmp_path: Path, packing: str) -> None:
    whole = PACK[packing](jsonl([f"text {number}" for number in range(30)]))
    path = tmp_path / f"in.jsonl.{packing}"
    for cut in range(12, len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match="can't be read to its end"):
            read(path)


def test_csv_with_a_header(tmp_path: Path) -> None:
    """As spreadsheets and pandas write it: quoted lines, a byte order mark, an empty line."""
    path = tmp_path / "in.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "content"])
        writer.writerows([n, text] for n, text in enumerate(TEXTS))
        file.write("\r\n")
    assert read(path, keys=("content",)) == [[text] for text in TEXTS]
    assert read(path, keys=("content", "id"))[1] == [TEXTS[1], "1"]


def test_csv_without_a_header(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("1,one\n2,two\n")
    with pytest.raises(UsageError, match="no column 'text': 1, one") as caught:
        read(path)
    assert "--csv-columns" in caught.value.remedy
    assert read(path, columns=("id", "text")) == [["one"], ["two"]]


def test_csv_of_another_encoding_and_delimiter(tmp_path: Path) -> None:
    path = tmp_path / "in.tsv"
    path.write_bytes("text\tid\n中文\t1\n".encode("gb18030"))
    assert read(path, encoding="gb18030") == [["中文"]]
    path = tmp_path / "in.csv"
    path.write_text("text;id\na,b;1\n")
    assert read(path, delimiter=";") == [["a,b"]]


def test_bad_rows_of_csv_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_bytes(b'text,id\n"a\nb",1\nc\nd,2\n\xff,3\ng,5\n')
    assert faults(path) == [
        (4, "1 field, and there are 2 columns"),
        (6, "not UTF-8: byte 0xff"),
    ]


def test_a_bad_row_of_csv_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('text,id\na,1\n"b\nc"\nd,2\n')
    (_, block) = next(sources.blocks(sources.sources([str(path)], Reading()), Reading()))
    (fault,) = records.documents(block, ("text",), stop=False).faults
    assert fault.excerpt == '"b\nc"\n'


@given(rows=st.lists(st.sampled_from(["a,1", '"b",2', '"c"d,3', '"e, 4', 'f",5', '"', ""])))
def test_no_row_of_csv_is_lost_or_invented(
    tmp_path_factory: pytest.TempPathFactory, rows: list[str]
) -> None:
    """What is read, even where bad rows are skipped, is what the rows are; else the job ends."""
    path = tmp_path_factory.mktemp("data") / "in.csv"
    path.write_text("\n".join(["text,id", *rows]) + "\n")
    try:
        wanted = list(csv.reader(io.StringIO("\n".join(rows) + "\n"), strict=True))
    except csv.Error:
        with pytest.raises(DataError, match=r"in\.csv:\d+: (not CSV|a quotation)") as caught:
            faults(path)
        assert "\n  | " in caught.value.problem
        return
    bad = faults(path)
    assert len(bad) == sum(len(row) not in (0, 2) for row in wanted)
    if not bad:
        assert read(path) == [[row[0]] for row in wanted if row]


@pytest.mark.parametrize("name", ["in.tsv", "IN.TSV", "in.tsv.gz"])
def test_tsv_has_no_quotations(tmp_path: Path, name: str) -> None:
    """Unless the delimiter is given: as a spreadsheet writes it."""
    path = tmp_path / name
    path.write_text('text\tid\n"so" he said\t1\n"\t2\n"three"\t3\n')
    assert read(path) == [['"so" he said'], ['"'], ['"three"']]
    path.write_text('text\tid\n"one\ntwo"\t1\n')
    assert read(path, delimiter="\t") == [["one\ntwo"]]


def test_a_quotation_without_an_end_takes_no_rows_with_it(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('text\na\n"b\nc\nd\n')
    with pytest.raises(DataError, match=r"in\.csv:3: a quotation begins here and has no end"):
        faults(path)


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    texts = TEXTS * 200
    table = pyarrow.table({"text": texts, "id": [str(n) for n in range(len(texts))]})
    pyarrow.parquet.write_table(table, path, row_group_size=300)
    assert read(path) == [[text] for text in texts]
    assert read(path, keys=("id", "text"))[999] == ["999", TEXTS[-1]]
    with pytest.raises(UsageError, match="no column 'content': text, id"):
        read(path, keys=("content",))


def test_bad_rows_of_parquet_have_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    column = pyarrow.array([b"a", b"\xff", None, b"d"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    bad = [(2, "not UTF-8: byte 0xff"), (3, "'text' is null, where a text is wanted")]
    assert faults(path) == bad
    text = pyarrow.Array.from_buffers(pyarrow.utf8(), 4, column.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    assert faults(path) == bad


def test_a_damaged_parquet_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS * 50}), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"in\.parquet: it can't be read"):
        read(path)


@pytest.mark.parametrize(
    ("unit", "documents"),
    [
        ("line", ["one", "two", " three"]),
        ("paragraph", ["one\ntwo", " three"]),
        ("file", ["one\ntwo\n\n\n three"]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_plain_text(tmp_path: Path, unit: str, documents: list[str], encoding: str) -> None:
    path = tmp_path / "in.txt"
    path.write_text("one\ntwo\n\n\n three", encoding=encoding)
    assert read(path, unit=unit, encoding=encoding) == [[document] for document in documents]


def test_plain_text_that_is_no_utf8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"one\n\ntw\xff\n")
    assert faults(path) == [(3, "not UTF-8: byte 0xff at 2")]
    assert faults(path, unit="paragraph") == [(3, "not UTF-8: byte 0xff")]


def test_globs_are_sorted_and_what_is_named_twice_is_read_twice(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([name]))
    assert read(tmp_path / "*.jsonl") == [["a"], ["b"], ["c"]]
    assert read(tmp_path / "c.jsonl", tmp_path / "[ac].jsonl") == [["c"], ["a"], ["c"]]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Given:
        buffer = io.BytesIO(gzip.compress(jsonl(TEXTS)))

    monkeypatch.setattr(sys, "stdin", Given)
    assert read("-") == [[text] for text in TEXTS]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent.jsonl", "no such file"),
        ("none-*.jsonl", "no such file"),
        ("", "a folder"),
        ("in.docx", ".docx doesn't say what it is"),
        ("in", "no ending doesn't say what it is"),
    ],
)
def test_what_is_no_input_is_told(tmp_path: Path, name: str, said: str) -> None:
    for made in ("in.docx", "in"):
        (tmp_path / made).touch()
    with pytest.raises(UsageError, match=said):
        read(tmp_path / name)


def test_an_unknown_encoding_is_told(tmp_path: Path) -> None:
    (tmp_path / "in.txt").touch()
    with pytest.raises(UsageError, match="utf-9: an unknown encoding"):
        read(tmp_path / "in.txt", encoding="utf-9")


@given(
    sizes=st.lists(st.lists(st.integers(0, 60), max_size=12), min_size=1, max_size=4),
    parts=st.integers(1, 7),
    packed=st.sets(st.integers(0, 3)),
    end=st.booleans(),
)
def test_shards_are_the_whole_divided(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[list[int]],
    parts: int,
    packed: set[int],
    end: bool,
) -> None:
    """In order, nothing twice, nothing lost: of files of any sizes, some of them packed."""
    folder = tmp_path_factory.mktemp("data")
    paths, number = [], 0
    for at, lengths in enumerate(sizes):
        texts = [f"{number + n} " + "x" * length for n, length in enumerate(lengths)]
        number += len(texts)
        content = jsonl(texts) if end else jsonl(texts).removesuffix(b"\n")
        paths.append(folder / f"{at}.jsonl")
        paths[-1].write_bytes(gzip.compress(content) if at in packed else content)
    shards = [read(*paths, shard=(part, parts)) for part in range(parts)]
    assert [*chain(*shards)] == read(*paths)
    assert len(read(*paths)) == number


@given(lines=st.lists(st.integers(0, 30), max_size=20), parts=st.integers(1, 6))
def test_a_shard_knows_its_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], parts: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "in.jsonl"
    path.write_bytes(jsonl([f"{number} " + "x" * n for number, n in enumerate(lines)]))
    for part in range(parts):
        reading = Reading(shard=(part, parts))
        for source in sources.sources([str(path)], reading):
            for _, block in sources.blocks([source], reading):
                texts = records.documents(block, ("text",), stop=True).texts[0]
                assert not texts or int(texts[0].split()[0]) == sources.lines_before(source)
