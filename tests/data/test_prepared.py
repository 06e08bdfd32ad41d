"""The text of a run is tokenized once, and anew when anything that matters is another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from launcher.data.prepared import prepared
from launcher.data.sources import Reading
from launcher.data.tokenize import Done
from launcher.data.tokenizers import Chosen
from launcher.errors import UsageError
from tests.data.conftest import documents

pytestmark = pytest.mark.usefixtures("loaded")


class Jobs:
    """Counts what is tokenized below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.done: list[Done] = []

    def prepare(self, *texts: Path, **how: object) -> Path:
        reading = Reading(**how)
        found = prepared([*map(str, texts)], self.folder, reading, Chosen(), workers=1)
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


def test_anew(jobs: Jobs, text: Path) -> None:
    prefixes = [jobs.prepare(text), jobs.prepare(text, unit="file"), jobs.prepare(text, text)]
    text.write_text("Hello\n")
    prefixes.append(jobs.prepare(text))
    assert len({*prefixes}) == len(jobs.done) == 4


def test_damaged_files_are_made_again(jobs: Jobs, text: Path) -> None:
    prefix = jobs.prepare(text)
    whole = Path(f"{prefix}.bin").read_bytes()
    Path(f"{prefix}.bin").write_bytes(whole[:-1])
    assert jobs.prepare(text) == prefix
    assert Path(f"{prefix}.bin").read_bytes() == whole


def test_standard_input_is_refused(jobs: Jobs) -> None:
    with pytest.raises(UsageError, match="standard input"):
        jobs.prepare(Path("-"))
