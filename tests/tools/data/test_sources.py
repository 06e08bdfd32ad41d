"""Inputs of every kind give the same documents; a damaged one never gives fewer in silence."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import os
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base import files, unpack
from launcher.base.errors import UsageError
from launcher.base.zstd import zstd
from launcher.tools.data import records, sources, tables
from launcher.tools.data.faults import DataError
from launcher.tools.data.records import Block
from launcher.tools.data.sources import ReadingOptions

ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
TEXTS = ["first, with a comma", 'second "quoted"\nof two lines', "", "第三 ", "x" * 5000]


def blocks(*inputs: Path | str, **how: object) -> Iterator[Block]:
    """The pieces in which inputs are read."""
    reading = ReadingOptions(**how)
    for _, block in sources.blocks(sources.sources([*map(str, inputs)], reading), reading):
        yield block


def read(*inputs: Path | str, keys: tuple[str, ...] = ("text",), **how: object) -> list[list[str]]:
    """Each document's texts of the keys."""
    found: list[list[str]] = []
    for block in blocks(*inputs, keys=keys, **how):
        read = records.documents(block, keys, limit=1)
        assert read.faults == []
        assert all(set(counts) <= {1} for counts in read.counts)
        found += [list(row) for row in zip(*read.texts, strict=True)]
    return found


def faults(path: Path, **how: object) -> list[tuple[int, str]]:
    """Where and why there are no documents."""
    found, before = [], 1
    for block in blocks(path, **how):
        read = records.documents(block, ("text",), limit=None)
        places = block.numbers or range(before, before + read.records)
        found += [(places[fault.at], fault.reason) for fault in read.faults]
        before += read.records
    return found


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


PACK: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": zstd.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def test_packed_files_of_other_beginnings(tmp_path: Path) -> None:
    """zstd with a skipped frame first, and with a large window; bzip2 of nothing; and text."""
    path = tmp_path / "in.txt"
    for text in ("BZhou", "BZh0", "BZh9 was here"):
        path.write_text(text)
        assert read(path) == [[text]]
    path.write_bytes(codecs.BOM_UTF8)
    assert read(path) == []
    path = tmp_path / "in.jsonl"
    for number in range(16):
        skipped = bytes([0x50 + number, 0x2A, 0x4D, 0x18]) + b"\3\0\0\0abc"
        path.write_bytes(skipped + zstd.compress(jsonl(TEXTS)))
        assert read(path) == [[text] for text in TEXTS]
    large = {zstd.CompressionParameter.window_log: 28, zstd.CompressionParameter.strategy: 1}
    with zstd.ZstdFile(path, "w", options=large) as file:
        file.write(jsonl(TEXTS))
    assert read(path) == [[text] for text in TEXTS]
    path.write_bytes(bz2.compress(b""))
    assert read(path) == []


@pytest.mark.parametrize("packing", PACK)
def test_a_packed_file_cut_anywhere_is_never_taken_for_whole(tmp_path: Path, packing: str) -> None:
    whole = PACK[packing](jsonl([f"text {number}" for number in range(30)]))
    path = tmp_path / f"in.jsonl.{packing}"
    behind = (b"x", b"x" + whole[1:], whole[:1], whole[:3])  # where the next frame should begin
    for damaged in (*(whole[:cut] for cut in range(12, len(whole))), *(whole + b for b in behind)):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="can't be read to its end"):
            read(path)


@pytest.mark.parametrize("packing", PACK)
@pytest.mark.parametrize("hidden", [False, True])
def test_packed_files(tmp_path: Path, packing: str, hidden: bool) -> None:
    """Two frames one after the other, as `cat a.gz b.gz` makes them, and zeros behind one."""
    path = tmp_path / ("in.jsonl" if hidden else f"in.jsonl.{packing}")
    packed = PACK[packing](jsonl(TEXTS))
    path.write_bytes(packed + packed)
    assert read(path) == [[text] for text in TEXTS * 2]
    if packing != "zst":
        path.write_bytes(packed + bytes(8) + packed + bytes(2 * unpack.PIECE))
        assert read(path) == [[text] for text in TEXTS * 2]


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
    path.write_bytes("内容\t1\n".encode("gb18030"))
    with pytest.raises(UsageError, match="its first row is of another encoding") as caught:
        read(path, keys=("内容",))
    assert caught.value.remedy == "--encoding gb18030"
    path = tmp_path / "in.csv"
    path.write_text("text;id\na,b;1\n")
    assert read(path, delimiter=";") == [["a,b"]]


def test_bad_rows_of_csv_have_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('text,id\na,1\n"b\nc"\nd,2\n')
    (fault,) = records.documents(next(blocks(path)), ("text",), limit=None).faults
    assert fault.excerpt == '"b\nc"\n'
    path.write_text('text\na\n"b\nc\nd\n')
    with pytest.raises(DataError, match=r"in\.csv:3: a quotation begins here and has no end"):
        faults(path)
    path.write_bytes(b'text,id\n"a\nb",1\nc\nd,2\n\xff,3\ng,5\n')
    assert faults(path) == [
        (4, "1 field, and there are 2 columns"),
        (6, "not UTF-8: byte 0xff; --encoding names another, like gb18030"),
    ]


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


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    texts = TEXTS * 200
    table = pyarrow.table({"text": texts, "id": [str(n) for n in range(len(texts))]})
    pyarrow.parquet.write_table(table, path, row_group_size=300)
    assert read(path) == [[text] for text in texts]
    assert read(path, keys=("id", "text"))[999] == ["999", TEXTS[-1]]
    with pytest.raises(UsageError, match="no column 'content': text, id"):
        read(path, keys=("content",))
    table = pyarrow.table([["a"], ["b"], ["c"]], names=["text", "text", "id"])
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(UsageError, match="more than one column 'text': text, text, id"):
        read(path)
    assert read(path, keys=("id",)) == [["c"]]


def test_long_rows_of_parquet_are_fewer_at_a_time(tmp_path: Path) -> None:
    """By the bytes of the columns that are read, group by group; no group at all is no document."""
    path = tmp_path / "in.parquet"
    texts = [f"{number} {number * 7919:x}" * 15_000 for number in range(40)] + ["a"] * 600
    table = pyarrow.table({"text": texts, "id": [str(n) for n in range(len(texts))]})
    pyarrow.parquet.write_table(table, path, row_group_size=40, use_dictionary=False)
    rows = [[row[0] for row in block.rows] for block in blocks(path)]
    assert [*chain(*rows)] == texts
    assert max(sum(map(len, block)) for block in rows) < 2 * tables.BYTES
    assert max(map(len, rows)) == 40
    assert len([*blocks(path, keys=("id",))]) == 16
    pyarrow.parquet.write_table(table.slice(0, 0), path)
    assert read(path) == []


def test_bad_rows_of_parquet_have_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    column = pyarrow.array([b"a", b"\xff", None, b"d"], pyarrow.binary())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
    bad = [(2, "not UTF-8: byte 0xff"), (3, "'text' is null, where a text is wanted")]
    assert faults(path) == bad
    text = pyarrow.Array.from_buffers(pyarrow.utf8(), 4, column.buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path)
    assert faults(path) == bad


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
    other = "; --encoding names another, like gb18030"
    assert faults(path) == [(3, f"not UTF-8: byte 0xff at 2{other}")]
    assert faults(path, unit="paragraph") == [(3, f"not UTF-8: byte 0xff{other}")]
    assert faults(path, encoding="gb18030") == [(3, f"not GB18030: byte 0xff{other}")]


def test_globs_are_sorted_and_leave_out_what_jobs_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl([name]))
    assert read(tmp_path / "*.jsonl") == [["a"], ["b"], ["c"]]
    assert read(tmp_path / "c.jsonl", tmp_path / "[ac].jsonl") == [["c"], ["a"], ["c"]]
    aside = files.aside_path(tmp_path / "a.jsonl", "0" * 16).name
    for name in ("a.rejects.jsonl", aside):
        (tmp_path / name).write_bytes(jsonl([name]))
    assert read(tmp_path / "*", format="jsonl") == [["a"], ["b"], ["c"]]
    for name in ("*.rejects.jsonl", "a.rejects.jsonl"):
        assert read(tmp_path / name, format="jsonl") == [["a.rejects.jsonl"]]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "~x.jsonl").write_bytes(jsonl(["x"]))
    assert read("~x.jsonl") == [["x"]]
    with pytest.raises(UsageError, match=r"~nobody-here/x\.jsonl: no such file"):
        read("~nobody-here/x.jsonl")
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        read("-")


def test_an_input_that_the_system_cant_read_is_named() -> None:
    """As on a broken disk: nothing is mapped where a process's memory begins."""
    with pytest.raises(OSError, match="Input/output error: '/proc/self/mem'"):
        read("/proc/self/mem", format="txt")


def test_a_pipe_that_doesnt_wait_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    later = threading.Timer(0.3, lambda: (os.write(theirs, jsonl(TEXTS)), os.close(theirs)))
    with open(ours, encoding="utf-8") as given:
        monkeypatch.setattr(sys, "stdin", given)
        later.start()
        assert read("-") == [[text] for text in TEXTS]
    later.join()


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
    os.mkfifo(tmp_path / "in.jsonl")
    with pytest.raises(UsageError, match=r"in\.jsonl: it can't be divided: it isn't a file"):
        read(tmp_path / "in.jsonl", shard=(0, 2))
    for encoding in ("utf-9", "hex", "rot13", "", "\udcff"):
        with pytest.raises(UsageError, match=f"{encoding}: an unknown encoding"):
            read(tmp_path / "in", format="txt", encoding=encoding)


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


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_a_block_of_short_lines_has_few_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes
) -> None:
    monkeypatch.setattr(sources, "RECORDS", 100)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join([b"x" * (number % 5) + end for number in range(5000)]))
    lines = [records.split(block.lines) for block in blocks(path)]
    assert max(map(len, lines)) < 200
    assert [len(line) for line in chain(*lines)] == [number % 5 for number in range(5000)]


@given(
    lines=st.lists(st.tuples(st.integers(0, 30), ENDS), max_size=20),
    parts=st.integers(1, 6),
    size=st.integers(1, 90),
)
def test_a_shard_knows_its_lines(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[int, bytes]],
    parts: int,
    size: int,
) -> None:
    path = tmp_path_factory.mktemp("data") / "in.jsonl"
    texts = [jsonl([f"{number} " + "x" * n]).strip() for number, (n, _) in enumerate(lines)]
    ends = [end for _, end in lines]
    path.write_bytes(b"".join(map(bytes.__add__, texts, ends)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources, "BLOCK", size)
        assert _check_lines(path, parts) == len(lines)


def _check_lines(path: Path, parts: int) -> int:
    """The lines of all shards, each of which knows its first one's number, and its size."""
    found = 0
    for part in range(parts):
        reading = ReadingOptions(shard=(part, parts))
        for source in sources.sources([str(path)], reading):
            begun, size = found, 0
            for place, block in sources.blocks([source], reading):
                read = records.documents(block, ("text",), limit=1)
                assert read.records == len(read.texts[0])
                assert int(read.texts[0][0].split()[0]) == found
                assert sources.lines_before(source) == begun
                found, size = found + read.records, place.read
            assert size == source.stop - source.start
    return found


MB = 1 << 20


@pytest.mark.parametrize(
    ("packing", "end"), [("gz", b"\n"), ("zst", b"\r\n"), ("bz2", b"\r"), ("xz", b"\n")]
)
def test_a_line_that_is_too_long_is_left_out(tmp_path: Path, packing: str, end: bytes) -> None:
    lines = [b'{"text": "a"}', b'{"text": "' + b"x" * 48 * MB, b'{"text": "b"}', b"{", b""]
    path = tmp_path / f"in.jsonl.{packing}"
    path.write_bytes(PACK[packing](end.join(lines)))
    first, second = faults(path, largest=2 * MB)
    assert first == (2, "more than 2 MB, which --max-record raises")
    assert second[0] == 4
    assert faults(path, largest=2 * MB, format="txt") == [first]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r", b""])
@pytest.mark.parametrize("more", [-1, 0, 1, 49, 50, 51, 500])
def test_the_limit_of_a_line_is_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: int, end: bytes
) -> None:
    """Wherever it lies in the pieces that are read, and in a shard as in the whole."""
    monkeypatch.setattr(sources, "BLOCK", 50)
    path = tmp_path / "in.txt"
    for before in (0, 1, 2, 47, 48, 49, 50, 51, 99):
        short = [b"-" * (before - len(end)) + end] if end and before > len(end) else []
        long = b"x" * (100 + more - len(end)) + end
        path.write_bytes(b"".join([*short, long, *([b"last"] if end else [])]))
        wanted = [*map(len, short), len(long) if more <= 0 else -1, *([4] if end else [])]
        assert lengths(path, end, 0, 1) == wanted
        assert [*chain(*(lengths(path, end, part, 3) for part in range(3)))] == wanted


def lengths(path: Path, end: bytes, part: int, parts: int) -> list[int]:
    """Of each line with its end; -1 of one that is too long."""
    found = []
    for block in blocks(path, shard=(part, parts), largest=100):
        read = records.documents(block, ("text",), limit=None)
        found += [-1] * len(read.faults)
        found += [len(text) + (len(end) if text != "last" else 0) for text in read.texts[0]]
    return found


@pytest.mark.parametrize(
    ("name", "how", "line"),
    [
        ("in.csv", {}, 3),
        ("in.tsv", {"columns": ("text",)}, 3),
        ("in.txt", {"unit": "paragraph"}, 4),
        ("in.txt", {"unit": "file"}, 1),
        ("in.txt", {"encoding": "gb18030"}, 4),
    ],
)
def test_rows_and_units_that_are_too_long_are_told(
    tmp_path: Path, name: str, how: dict[str, Any], line: int
) -> None:
    """Where a line is, and where many are one record."""
    begun = b'text,id\na,1\n"' if name == "in.csv" else b"text\na\n" + b"\n" * (line - 3)
    path = tmp_path / f"{name}.gz"
    said = rf"{name}\.gz:{line}: more than 2 MB, which --max-record raises\n  \| "
    for part, size in [(b"no end " * 512, 40), (b"short\n", 8)]:
        if size == 8 and name != "in.csv" and "unit" not in how:
            continue  # each line is a record of its own
        path.write_bytes(gzip.compress(begun + part * (size * MB // len(part))))
        with pytest.raises(DataError, match=said):
            faults(path, largest=2 * MB, **how)


def test_rows_of_parquet_that_are_too_long_are_told(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    long = "x" * (2 * MB + 1)
    table = pyarrow.table({"text": [["a"], ["b", long], ["c"], [long[:-2]]]})
    pyarrow.parquet.write_table(table, path)
    assert faults(path, largest=2 * MB) == [(2, tables.too_large(2 * MB))]
    table = pyarrow.table({"text": ["a", *["x" * (8 << 20)] * 3]})
    pyarrow.parquet.write_table(table, path, row_group_size=1, use_dictionary=False)
    with pytest.raises(DataError, match=r"in\.parquet:2: more than 2 MB"):
        faults(path, largest=2 * MB)
