"""The files of a job: written, all or nothing; converted; read back; how far it is."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.runs.datasets import indexed, output
from launcher.runs.datasets.output import OutputBusy, alone
from launcher.tools.data import bar, tables
from launcher.tools.data.bar import Bar
from launcher.tools.data.faults import DataError, excerpt
from launcher.tools.data.jsonl import convert
from launcher.tools.data.ledger import JobState, Leniency
from launcher.tools.data.records import Block, documents
from launcher.tools.data.sources import ReadingOptions
from tests.runs.follow.test_live import Terminal
from tests.tools.data.conftest import documents as documents_of
from tests.tools.data.conftest import write_jsonl


def fails(number: int) -> Callable[..., NoReturn]:
    def flock(file: object, operation: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return flock


def test_a_file_is_one_jobs(tmp_path: Path) -> None:
    target = tmp_path / "a"
    with ExitStack() as first:
        (ours,) = alone([target], first)
        ours.file.write(b"ours")
        with ExitStack() as second, pytest.raises(OutputBusy, match="another job writes it"):
            alone([target], second)
        assert ours.path.exists()
    assert not os.listdir(tmp_path)
    files.aside_path(target, "0" * 16).write_bytes(b"left by a killed job")
    with ExitStack() as third:
        alone([target], third)
        assert len(os.listdir(tmp_path)) == 1
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("number", files.UNLOCKABLE)
def test_a_file_system_without_locks_is_written_and_a_broken_or_open_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", fails(number))
    with ExitStack() as stack:
        assert alone([tmp_path / "a"], stack)[0].file.write(b"text") == 4
    monkeypatch.setattr(fcntl, "flock", fails(errno.EIO))
    with ExitStack() as stack, pytest.raises(OSError, match="Input/output error"):
        alone([tmp_path / "b"], stack)
    monkeypatch.undo()
    tmp_path.chmod(0o777)
    with ExitStack() as stack, pytest.raises(files.ForeignFileError, match="everybody"):
        alone([tmp_path / "c"], stack)


def test_who_waits_goes_on_when_the_file_is_free(tmp_path: Path) -> None:
    output.wait(tmp_path / "absent.bin")
    waiting = threading.Thread(target=output.wait, args=(tmp_path / "a.bin",))
    with ExitStack() as stack:
        alone([tmp_path / "a.bin"], stack)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
    waiting.join(30)
    assert not waiting.is_alive()


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
    assert indexed.read_index(tmp_path / "d") == indexed.DatasetIndex(3, 3, 4, code)


def damaged(prefix: Path) -> str:
    with pytest.raises(indexed.DamagedDataset) as caught:
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


SKIP = Leniency(skip=True)


def run(*inputs: Path, to: Path, leniency: Leniency = SKIP) -> JobState:
    return convert([*map(str, inputs)], to, ReadingOptions(), leniency, lambda done: None)


def test_an_output_is_no_input(tmp_path: Path) -> None:
    """Not under another name either; a list of bad records isn't one by a pattern."""
    source, target = write_jsonl(tmp_path / "a.jsonl", ["a"]), tmp_path / "out.jsonl"
    with source.open("a") as file:
        file.write("{\n")
    pattern, rejects = tmp_path / "*.jsonl", tmp_path / "out.jsonl.rejects.jsonl"
    assert run(pattern, to=target).rejected == 1
    with pytest.raises(UsageError, match=r"out\.jsonl: it would be written while it is read"):
        run(pattern, to=target)
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(UsageError, match=r"out\.jsonl: it would be written while it is read"):
        run(target, to=tmp_path / "link")
    with pytest.raises(UsageError, match=r"rejects\.jsonl: it would be written while it is read"):
        run(rejects, to=target)
    target.unlink()
    assert run(pattern, to=tmp_path / "other").documents == 1


def test_bad_records_are_listed_in_json_whatever_the_name(tmp_path: Path) -> None:
    source = tmp_path / "a\udcff.jsonl"
    source.write_text('{"text": "a"}\n{"text": 1}\n')
    done = run(source, to=tmp_path / "out")
    assert (done.documents, done.rejected) == (1, 1)
    (listed,) = (tmp_path / "out.rejects.jsonl").read_text("utf-8").splitlines()
    assert json.loads(listed) == {
        "file": f"{tmp_path}/a\\udcff.jsonl",
        "line": 2,
        "reason": "'text' is a number, where a text is wanted",
        "begins": '{"text": 1}',
    }


def test_a_shards_bad_records_have_the_files_lines(tmp_path: Path) -> None:
    """By what ends them in text files, CR too."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(b"{%d\r\r\n" % number for number in range(100)))
    reading = ReadingOptions(shard=(1, 2))
    convert([str(source)], tmp_path / "out", reading, SKIP, lambda done: None)
    listed = (tmp_path / "out.rejects.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in listed]
    assert [record["line"] for record in found][-1] == 199
    assert all(record["begins"] == f"{{{record['line'] // 2}" for record in found)


BLOCKS = [
    Block(lines=b'{"text": "a"}\n{\n{"text": "b"}\n[]\n\n{}\n'),
    Block(rows=[["a"], [1], ["b"], [None], [""], [[2]]], numbers=range(1, 7)),
]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("limit", "at", "texts"),
    [(1, [1], 1), (2, [1, 3], 2), (3, [1, 3, 5], None), (None, [1, 3, 5], None)],
)
def test_no_more_faults_are_collected_than_are_wanted(
    block: Block, limit: int | None, at: list[int], texts: int | None
) -> None:
    found = documents(block, ("text",), limit)
    assert [fault.at for fault in found.faults] == at
    assert found.records == at[-1] + 1
    assert [text for text in found.texts[0] if text] == ["a", "b"][:texts]


@pytest.mark.parametrize("other", [b"\f", b"\v", b" \x1c ", "\u00a0".encode(), "\u3000".encode()])
def test_only_spaces_and_tabs_are_an_empty_line(other: bytes) -> None:
    """A form feed alone was left out of jsonl, as if it were one, and upstream ends at it."""
    assert documents(Block(lines=b"\n \t\r\n\n"), ("text",), None).blank == 3
    (fault,) = documents(Block(lines=other + b"\n"), ("text",), None).faults
    assert fault.reason.startswith("not JSON")
    found = documents(Block(lines=b" \t\n" + other + b"\n", plain=True), ("text",), None)
    assert (found.blank, found.texts) == (1, [[other.decode()]])
    for unit in ("line", "paragraph", "file"):
        text = tables.TextLines("", io.StringIO(f" \t\n\n{other.decode()}\n"), 99)
        rows = [row for _, row in tables.units(text, unit)]
        assert rows == [[" \t\n\n" * (unit == "file") + other.decode() + "\n" * (unit == "file")]]


@pytest.mark.parametrize(
    ("record", "begins"),
    [
        ("中" * 300, "中" * 200),
        ("a" + "🙂" * 300, "a" + "🙂" * 199),
        ("é" * 5, "é" * 5),
    ],
)
def test_the_first_200_characters_are_kept(record: str, begins: str) -> None:
    assert excerpt(record) == excerpt(record.encode()) == excerpt([record]) == begins
    assert excerpt(b"\xff" * 300) == r"\xff" * 50  # what is no UTF-8 is shown
    assert excerpt("\udcff" * 300) == r"\udcff" * 33 + r"\u"
    assert excerpt(["it's", ["one", "b" * 300], 7]) == "it's, one, " + "b" * 189


def test_piped_lines_have_a_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 110.0, 120.0])
    monkeypatch.setattr(bar, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    report = Bar(stream)
    report(JobState(read=1, size=4))  # too early to be told
    report(JobState(read=30_000_000, size=120_000_000, documents=500))
    report.end(JobState(read=120_000_000, size=120_000_000, documents=2000), ["a.bin"])
    working, done = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (working["state"], working["seconds"]) == ("working", 10)
    assert (working["documents_per_s"], working["mb_per_s"], working["eta_s"]) == (50, 3, 30)
    assert (done["state"], done["documents_per_s"], done["mb_per_s"]) == ("done", 100, 6)
    assert (done["eta_s"], done["files"]) == (0, ["a.bin"])


def test_an_error_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar, "SHOWN", 0)
    stream = Terminal()

    def job() -> None:
        with Bar(stream) as report:
            report(JobState(documents=5))
            raise DataError("a bad line")

    with pytest.raises(DataError):
        job()
    assert "5 documents" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    with Bar(stream) as report:
        report.end(JobState(documents=5), ["a.bin"])
    assert stream.getvalue().endswith("  a.bin\n")  # what was made stays


@pytest.mark.parametrize(
    ("read", "size", "left"), [(5, 0, None), (0, 9, None), (9, 9, 0), (10, 9, 0), (3, 9, 20)]
)
def test_what_is_left_is_told_where_it_is_known(
    monkeypatch: pytest.MonkeyPatch, read: int, size: int, left: int | None
) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr(bar, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    Bar(stream)(JobState(read=read, size=size))
    assert json.loads(stream.getvalue())["eta_s"] == left
    assert (" left" in bar.line(JobState(read=read, size=size), 10.0)) == (left is not None)


def test_no_output_is_named_before_all_are_complete() -> None:
    """The index of a full disk's data would have stood beside the data of before."""
    named = list[str]()

    def full() -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    outputs = [
        SimpleNamespace(complete=lambda: None, publish=lambda: named.append("idx")),
        SimpleNamespace(complete=full, publish=lambda: named.append("bin")),
    ]
    with pytest.raises(OSError, match="No space"):
        output.publish(outputs)
    assert named == []
