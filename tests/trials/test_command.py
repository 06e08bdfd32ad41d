"""`matrix compat` writes its reports, and says whether all is well, whatever was found."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import requests

from launcher import cli
from launcher.cli import main
from launcher.engine import connect
from launcher.settings import ROOT
from launcher.trials import report, series
from launcher.trials.result import Cell, Result
from tests.trials.samples import RESULTS, result

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command on a matrix in a folder of its own, where trying finds what is given."""
    for name in ("matrix.yaml", "matrix.lock", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setenv("LAUNCHER_MATRIX", str(tmp_path / "matrix.yaml"))
    monkeypatch.setattr(connect, "connect", lambda **_: None)

    def run(results: Iterable[Result], *args: str) -> int:
        def found(self: series.Series, cells: Iterable[Cell]) -> Iterator[Result]:
            return iter(results)

        monkeypatch.setattr(series.Series, "run", found)
        return main(["matrix", "compat", "cpu", "-o", str(tmp_path / "out"), *args])

    return run


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()


def test_each_report_tells_of_each_cell(run: Run, tmp_path: Path) -> None:
    assert run(RESULTS) == 1
    out = tmp_path / "out"
    assert len(json.loads((out / "report.json").read_text())["cells"]) == len(RESULTS)
    assert ElementTree.parse(out / "report.xml").getroot().get("failures") == "2"  # noqa: S314
    page, table = (out / "report.html").read_text(), (out / "report.md").read_text()
    for one in RESULTS:
        assert f'id="{one.tag}-{one.megatron}"' in page
        assert f"| {one.tag} | {one.megatron} | {one.told} |" in table
    assert not (tmp_path / report.RESULTS).exists()


@pytest.mark.parametrize(
    ("end", "code"),
    [(requests.exceptions.ConnectionError("engine gone"), 125), (KeyboardInterrupt(), 130)],
)
def test_a_series_that_ends_early_reports_what_it_has(
    run: Run, tmp_path: Path, end: BaseException, code: int
) -> None:
    def found() -> Iterator[Result]:
        yield from RESULTS[:2]
        raise end

    assert run(found(), "--write") == code
    out = tmp_path / "out"
    assert len(json.loads((out / "report.json").read_text())["cells"]) == 2
    assert {path.name for path in out.iterdir()} == {
        f"report.{k}" for k in "json xml md html".split()
    }
    assert not (tmp_path / report.RESULTS).exists()


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ([], {}),
        (
            ["TAGS=24.09 cpu", "MEGATRON=0.9.0 0.12.3", "GPUS=device=0,1", "DISK=7.5", "LIMIT=30"],
            {
                "tags": ["24.09", "cpu"],
                "megatron": ["0.9.0", "0.12.3"],
                "gpus": "device=0,1",
                "disk": 7.5,
                "limit": 30.0,
            },
        ),
        (
            ["BASE=a.example/b:{tag}", "BUILDER=c"],
            {"base": "a.example/b:{tag}", "builder": "c"},
        ),
    ],
)
def test_make_hands_on_what_it_is_given(given: list[str], taken: dict[str, object]) -> None:
    done = subprocess.run(
        ["make", "-n", "--no-print-directory", "compat", *given],  # make itself runs these tests
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    words = shlex.split(done.stdout.partition("-m launcher ")[2].replace("\\\n", ""))
    parser = cli.parser(words)
    usual = vars(parser.parse_args(["matrix", "compat"]))
    assert vars(parser.parse_args(words)) == {**usual, **taken}


def test_write_keeps_them_for_the_readme(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([result("24.02", "runs", "runs"), result("24.10", "runs")]) == 0
    assert run(RESULTS[:1], "--write") == 0
    assert "make render" in capsys.readouterr().err
    assert run(RESULTS[1:2], "--write") == 0
    assert report.load_committed(tmp_path) == RESULTS[:2]
    shutil.copy(ROOT / "Dockerfile.template", tmp_path)
    assert main(["matrix", "render"]) == 0
    assert "| 24.03 | 0.9.0 | runs |" in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert main(["matrix", "render", "--check"]) == 0
    report.commit([result("24.03", "imports")], tmp_path)
    assert main(["matrix", "render", "--check"]) == 1
    assert "README.md differs" in capsys.readouterr().err
