"""How far a job is, in a line and in JSON: with its speed, and the time that is left."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace

import pytest

from launcher.data import bar
from launcher.data.bar import Bar
from launcher.data.faults import DataError
from launcher.data.tokenize import Done


def test_piped_lines_have_a_speed_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 103.0, 110.0, 120.0])
    monkeypatch.setattr(bar, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    report = Bar(stream)
    report(Done(read=1, size=4))  # too early to be told
    report(Done(read=30_000_000, size=120_000_000, documents=500))
    report.end(Done(read=120_000_000, size=120_000_000, documents=2000), ["a.bin"])
    working, done = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (working["state"], working["seconds"]) == ("working", 10)
    assert (working["documents_per_s"], working["mb_per_s"], working["eta_s"]) == (50, 3, 30)
    assert (done["state"], done["documents_per_s"], done["mb_per_s"]) == ("done", 100, 6)
    assert (done["eta_s"], done["files"]) == (0, ["a.bin"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_error_has_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bar, "SHOWN", 0)
    stream = Terminal()

    def job() -> None:
        with Bar(stream) as report:
            report(Done(documents=5))
            raise DataError("a bad line")

    with pytest.raises(DataError):
        job()
    assert "5 documents" in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")
    with Bar(stream) as report:
        report.end(Done(documents=5), ["a.bin"])
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
    Bar(stream)(Done(read=read, size=size))
    assert json.loads(stream.getvalue())["eta_s"] == left
    assert (" left" in bar.line(Done(read=read, size=size), 10.0)) == (left is not None)
