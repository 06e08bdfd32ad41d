"""The text of a run is tokenized once, and anew when anything that matters is another."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from launcher.base.errors import UsageError
from launcher.tools.data.faults import DataError
from launcher.tools.data.ledger import JobState
from launcher.tools.data.prepared import prepared
from launcher.tools.data.sources import ReadingOptions
from launcher.tools.data.tokenizers import TokenizerChoice
from tests.tools.data.conftest import documents

pytestmark = pytest.mark.usefixtures("loaded")


class Jobs:
    """Counts what is tokenized below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[JobState] = []

    def prepare(self, *texts: Path, **how: object) -> Path:
        reading = ReadingOptions(**how)
        found = prepared([*map(str, texts)], self.folder, reading, TokenizerChoice(), workers=1)
        done = found.make(lambda _: None)
        self.done += [done] if done else []
        return found.prefix


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path / "cache")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("Hello world\n\nHello world\n")
    return path


def test_once(jobs: Jobs, text: Path) -> None:
    prefix = jobs.prepare(text)
    assert documents(prefix) == [[[15496, 995, 50256]]] * 2
    assert jobs.prepare(text) == prefix
    elsewhere = text.with_name("copy.txt")
    shutil.copy(text, elsewhere)
    assert jobs.prepare(elsewhere) == prefix
    assert len(jobs.done) == 1
    data = Path(f"{prefix}.bin")
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])  # damaged files are made again
    assert jobs.prepare(text) == prefix
    assert data.read_bytes() == whole


def test_anew(jobs: Jobs, text: Path) -> None:
    prefixes = [jobs.prepare(text), jobs.prepare(text, unit="file"), jobs.prepare(text, text)]
    text.write_text("Hello\n")
    prefixes.append(jobs.prepare(text))
    for name in ("a.csv", "a.tsv", "a.txt"):  # whose ending says how it is read
        text.with_name(name).write_text("text\nHello\n")
        prefixes.append(jobs.prepare(text.with_name(name)))
    assert len({*prefixes}) == len(jobs.done) == 7


def test_a_pipe_and_a_text_without_documents_are_refused(jobs: Jobs, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="standard input"):
        jobs.prepare(Path("-"))
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(DataError, match="the text of the run has no document"):
        jobs.prepare(empty)
    assert [*jobs.folder.iterdir()] == []
    os.mkfifo(tmp_path / "in.txt")
    with pytest.raises(UsageError, match="not a file, and the text of a run is read twice"):
        jobs.prepare(tmp_path / "in.txt")


def test_a_text_that_changes_meanwhile_is_not_kept(jobs: Jobs, text: Path) -> None:
    found = prepared([str(text)], jobs.folder, ReadingOptions(), TokenizerChoice(), workers=1)

    def change(done: JobState) -> None:
        text.write_text("Hello\n")

    with pytest.raises(DataError, match="changed while it was tokenized"):
        found.make(change)
    assert [*jobs.folder.iterdir()] == []


def test_a_bad_record_is_left_out_by_another_command(jobs: Jobs, tmp_path: Path) -> None:
    """A run has no --on-error."""
    (tmp_path / "in.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"in\.jsonl:1: not JSON") as caught:
        jobs.prepare(tmp_path / "in.jsonl")
    assert "`launcher data tokenize` with --on-error skip" in caught.value.remedy
    assert "data.path" in caught.value.remedy


def test_a_file_that_comes_later_is_not_read(jobs: Jobs, text: Path) -> None:
    found = prepared(
        [str(text.with_name("*.txt"))], jobs.folder, ReadingOptions(), TokenizerChoice(), workers=1
    )
    text.with_name("later.txt").write_text("Hello\n")
    found.make(lambda _: None)
    assert len(documents(found.prefix)) == 2


def test_another_launcher_that_tokenizes_it_is_waited_for(
    jobs: Jobs, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = prepared([str(text)], jobs.folder, ReadingOptions(), TokenizerChoice(), workers=1)
    second: list[JobState | None] = []
    waiting = threading.Thread(target=lambda: second.append(found.make(lambda _: None)))

    def meanwhile(done: JobState) -> None:
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()

    assert found.make(meanwhile)
    waiting.join(30)
    assert second == [None]
    assert "another launcher tokenizes the text: waiting" in capsys.readouterr().err
