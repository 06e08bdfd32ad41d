"""Verdicts, what they are compared with, and the files that are made of them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from launcher.base.errors import UsageError
from launcher.base.settings import ROOT
from launcher.tools.trials import html, result, trial_report
from launcher.tools.trials.result import Cell, CellResult
from tests.tables import table
from tests.tools.trials import samples
from tests.tools.trials.samples import RESULTS, trial

FINE = {"extension": {"error": ""}, "training": {"error": ""}}


@pytest.mark.parametrize(
    ("facts", "trials", "verdict", "stage"),
    [
        ({}, {}, "builds", ""),
        (FINE, {}, "imports", ""),
        (FINE, {"a": trial("skipped")}, "imports", ""),
        (FINE, {"a": trial("runs"), "b": trial("skipped")}, "runs", ""),
        (FINE, {"a": trial("runs"), "b": trial("runs with warnings")}, "runs with warnings", ""),
        (FINE, {"a": trial("runs"), "b": trial("fails", stage="train")}, "fails", "train"),
        ({**FINE, "extension": {"error": "ImportError: no"}}, {}, "fails", "import"),
        ({**FINE, "training": {"error": "no six"}}, {"a": trial("runs")}, "fails", "import"),
        ({"apex_layer": {"error": "no kernel"}}, {"a": trial("runs")}, "fails", "import"),
    ],
)
def test_the_verdict_is_the_least_that_was_reached(
    facts: dict[str, Any], trials: dict[str, Any], verdict: str, stage: str
) -> None:
    found = result.verdict(facts, trials)
    assert (found["verdict"], found.get("stage", "")) == (verdict, stage)
    assert stage != "import" or " no" in found["reason"]
    for state in ("runs", "fails"):
        warned = {"a": trial("runs", warnings="xy"), "b": trial(state, warnings="yz")}
        assert result.verdict(FINE, warned)["warnings"] == ("x", "y", "z")


@given(st.sampled_from(result.ORDER), st.sampled_from([None, *result.ORDER]))
def test_a_cell_is_worse_or_better_than_expected_or_neither(
    verdict: str, expected: str | None
) -> None:
    found = CellResult("24.10", "0.9.0", "key", verdict, expected)
    assert not (found.worse and found.better)
    assert (found.worse or found.better) is (expected not in (None, verdict))
    if expected == "fails":
        assert not found.failure
    if expected is None:
        assert found.failure is (verdict == "fails")


@table("warning", "about")
def test_causes_that_are_known_are_told(warning: str, about: str) -> None:
    assert about in result.cause(warning)
    assert sum(bool(re.search(says, warning)) for says, _ in result.CAUSES) == 1
    for other in ("UserWarning: another", "FutureWarning: `custom_fwd` is here", ""):
        assert result.cause(other) == ""


CELLS = [
    CellResult(
        *("24.02", "0.9.0", "k", "runs", "runs"),
        facts={"gpus": {"value": None, "error": "", "warnings": []}},
        seconds={"compile": 40.0, "train": 60.5},
    ),
    CellResult(
        *("24.08", "0.9.0", "k", "runs with warnings", "runs"),
        warnings=("FutureWarning: torch.cuda.amp.custom_fwd is old",),
    ),
    CellResult(
        *("24.10", "0.9.0", "k", "fails", "runs with warnings"),
        stage="train",
        reason="entrypoint: exit code 1 | \\odd\\ <b>",
        tail=("last\x1b[0m", "line <&>"),
    ),
    CellResult("cpu", "0.16.1", "k", "runs", "imports"),
]


def test_the_table_says_what_was_expected() -> None:
    assert trial_report.as_markdown(CELLS[:1]) == trial_report.table(CELLS[:1])
    told = trial_report.as_markdown(CELLS).splitlines()
    assert told[2] == "| 24.02 | 0.9.0 | runs | runs | CPU |  |"
    assert "| runs with warnings | runs (worse) |  | " in told[3]
    assert (
        "| fails: train | runs with warnings (worse) |  | "
        "`entrypoint: exit code 1 \\| \\odd\\ <b>` |" in told[4]
    )
    assert "| runs | imports (better) |" in told[5]
    assert told[-1].startswith("| `FutureWarning: torch.cuda.amp.custom_fwd is old` | ")
    assert told[-1].endswith(" two decorators as torch before 2.4 did | 24.08 × 0.9.0 |")


def test_warnings_are_told_once_for_all_cells_whatever_their_numbers() -> None:
    one, other = (replace(CELLS[1], tag=tag) for tag in ("24.08", "24.09"))
    one = replace(one, warnings=("a 1", "b", "a 2"))
    other = replace(other, warnings=("c", "a 0x7f3e"))
    told = result.warned([one, other])
    assert [(each.text, [r.tag for r in each.results]) for each in told] == [
        ("a 1", ["24.08", "24.09"]),
        ("b", ["24.08"]),
        ("c", ["24.09"]),
    ]


MARKDOWN = MarkdownIt("gfm-like", {"linkify": False})
TOLD = (
    "`one` `` two ``` three",
    "`",
    "| \\| \\\\| \\",
    "*a* _b_ **c** ~~d~~ [e](f) ![g](h) [i]: j",
    "@someone #1 &lt; &#64; <b onclick=1> </td> <!-- www.example.com https://example.com a@b.c",
    "\x1b[31m- # 1. > \n\n| a | b |\n\u2028 last",
)


def shown(markdown: str) -> tuple[list[str], list[list[Token]]]:
    """What a reader of Markdown sees: the kinds of blocks, and of each cell what is in it."""
    tokens = MARKDOWN.parse(markdown)
    cells = [token.children or [] for token in tokens if token.type == "inline"]
    return [token.type for token in tokens], cells


def held(text: str) -> str:
    """How a text of a log is shown."""
    return re.sub(r"\\(?=\|)", r"\\ ", " ".join(trial_report.plain(text).split()))


@given(st.one_of(st.text(), st.text("`|\\ *_[]()!@#&<>~-:/a\n"), st.sampled_from(TOLD)))
def test_a_text_of_a_log_says_nothing_to_markdown(text: str) -> None:
    one = replace(CELLS[1], reason=text, warnings=(text,))
    plain = replace(one, reason="a", warnings=("a",))
    blocks, cells = shown(trial_report.as_markdown([one]))
    assert blocks == shown(trial_report.as_markdown([plain]))[0]
    for cell in (cells[11], cells[15]) if held(text) else ():
        assert [(token.type, token.content) for token in cell] == [("code_inline", held(text))]
    assert len(trial_report.table([one]).splitlines()) == 3


def test_what_the_readme_shows_is_text() -> None:
    _, cells = shown(trial_report.table(trial_report.load_committed(ROOT)))
    assert {token.type for cell in cells for token in cell} == {"text"}


def test_junit_has_a_failure_for_each_cell_that_got_worse() -> None:
    suite = ElementTree.fromstring(trial_report.as_junit(CELLS))  # noqa: S314 - our own
    assert (suite.get("tests"), suite.get("failures")) == ("4", "2")
    failed = [case for case in suite if case.find("failure") is not None]
    assert [case.get("classname") for case in failed] == ["compat.24.08", "compat.24.10"]
    assert failed[1].findtext("failure") == "last\nline <&>"
    assert suite[0].get("time") == "100.5"


@given(st.lists(st.text(), max_size=3), st.text())
def test_junit_is_xml_whatever_was_printed(tail: list[str], reason: str) -> None:
    one = CellResult("a", "b", "k", "fails", stage="train", reason=reason, tail=tuple(tail))
    assert len(ElementTree.fromstring(trial_report.as_junit([one]))) == 1  # noqa: S314


def test_json_is_read_as_it_was_written() -> None:
    written = trial_report.as_json(CELLS)
    assert trial_report.from_json(written, "here") == CELLS
    (warning,) = json.loads(written)["cells"][1]["warnings"]
    assert warning["cause"].startswith("Megatron before 0.10.0")
    for text in ("", "{}", "[]", '{"cells": [{"tag": "x"}]}', '{"cells": 1}'):
        with pytest.raises(UsageError, match="here"):
            trial_report.from_json(text, "here")


@given(st.text(), st.text())
def test_control_sequences_go_and_text_stays(before: str, after: str) -> None:
    for sequence in ("\x1b[0m", "\x1b[38;5;9m", "\x1b]0;title\x07", "\x1b]8;;x\x1b\\", "\x1bM"):
        whole = trial_report.plain(f"{before}{sequence}|{after}")
        assert whole == f"{trial_report.plain(before)}|{trial_report.plain(after)}"


PAGE = f"# A\n\n{trial_report.BEGIN}\n\nold\n{trial_report.END}\nafter\n"


def test_a_cell_is_replaced_by_its_newer_result_on_the_same_gpus() -> None:
    old = RESULTS[0]
    better = replace(old, verdict="runs with warnings")
    on_cpu = replace(old, facts=samples.facts("2.13.0+cpu", "12.1", gpus=None))
    failed = replace(old, verdict="fails", stage="pull", facts={}, trials={})
    assert trial_report.merged([old], [better, on_cpu]) == [better, on_cpu]
    assert [one.trained_on for one in (better, on_cpu)] == ["2 × NVIDIA H100 80GB HBM3", "CPU"]
    assert trial_report.merged([failed], [old]) == [old]  # it doesn't say which GPUs it had
    other = replace(failed, tag="24.03")
    assert trial_report.merged([other], [old]) == [old, other]
    versions = ("0.16.1", "0.9.0", "0.10.0")
    found = trial_report.merged([], [replace(old, megatron=version) for version in versions])
    assert [one.megatron for one in found] == ["0.9.0", "0.10.0", "0.16.1"]


def test_what_is_committed_is_shown(tmp_path: Path) -> None:
    page = tmp_path / trial_report.TABLE
    page.parent.mkdir()
    page.write_text(PAGE)
    assert html.rendered(tmp_path) == {}
    trial_report.commit(RESULTS[:2], tmp_path)
    trial_report.commit(RESULTS[1:], tmp_path)
    assert trial_report.load_committed(tmp_path) == trial_report.merged([], RESULTS)
    files = html.rendered(tmp_path)
    assert "| 24.02 | 0.9.0 | runs | runs | 2 × NVIDIA H100 80GB HBM3 |  |\n" in files[page]
    assert "old" not in files[page]
    assert files[page].endswith(f"{trial_report.END}\nafter\n")
    assert 'id="24.02-0.9.0"' in files[tmp_path / trial_report.PAGE]
    page.write_text(files[page])
    assert html.rendered(tmp_path) == files
    rows = {Cell("24.02", "0.16.1"): "runs", Cell("cpu-3.13", "0.19.2"): None}
    shown_rows = html.rendered(tmp_path, rows)[page]
    assert re.search(r"^Not tried by `matrix compat`: .*\bcpu-3\.13\.$", shown_rows, re.MULTILINE)
    assert "| 24.02 | 0.16.1 |" not in shown_rows
    page.write_text("no markers")
    with pytest.raises(UsageError, match=r"compat\.md"):
        html.rendered(tmp_path)


def test_what_is_committed_is_of_the_matrix_and_of_no_machine() -> None:
    text = (ROOT / trial_report.RESULTS).read_text(encoding="utf-8")
    assert trial_report.as_json(trial_report.load_committed(ROOT)) == text
    for place in ("/home/", "/root/", "/Users/", "/tmp/"):  # noqa: S108
        assert place not in text
