"""What is converted is whole, written by one job at a time, and never read while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.data.convert import convert
from launcher.data.ledger import Done, Leniency
from launcher.data.sources import Reading
from launcher.errors import UsageError
from tests.data.conftest import write_jsonl

SKIP = Leniency(skip=True)


def run(*inputs: Path, to: Path, leniency: Leniency = SKIP) -> Done:
    return convert([*map(str, inputs)], to, Reading(), leniency, lambda done: None)


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
    reading = Reading(shard=(1, 2))
    convert([str(source)], tmp_path / "out", reading, SKIP, lambda done: None)
    listed = (tmp_path / "out.rejects.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in listed]
    assert [record["line"] for record in found][-1] == 199
    assert all(record["begins"] == f"{{{record['line'] // 2}" for record in found)
