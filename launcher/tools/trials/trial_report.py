"""Writes results as JSON, JUnit XML and Markdown, deterministically.

Those that are committed are merged with newer ones; docs/compat.md shows their table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from xml.etree import ElementTree

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.tools.trials.result import Cell, CellResult, cause, warned

RESULTS, PAGE, TABLE = "docs/compat.json", "docs/compat.html", "docs/compat.md"
"""Committed results, their page, and the page with their table, below the matrix' folder."""

BEGIN, END = "<!-- compat: written by `make render` -->", "<!-- /compat -->"
"""The markers around the table."""

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
"""A terminal's control sequence (ECMA-48, 5.4 and 5.6): colours, titles, links."""


def as_json(results: Sequence[CellResult]) -> str:
    """All that was found, with the cause of each warning where it is known."""
    told = []
    for one in results:
        causes = [{"text": text, "cause": cause(text)} for text in one.warnings]
        told.append({**asdict(one), "warnings": causes})
    return json.dumps({"cells": told}, indent=2, sort_keys=True) + "\n"


def from_json(text: str, source: str) -> list[CellResult]:
    """The results in what `as_json` wrote. Raises UsageError, naming `source`, for another text."""
    try:
        return [
            CellResult(**{**told, "warnings": [one["text"] for one in told["warnings"]]})
            for told in json.loads(text)["cells"]
        ]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{source}: not a report.json of `matrix compat`: {type(error).__name__}: {error}",
            "Take it from the repository again.",
        ) from error


def as_junit(results: Sequence[CellResult]) -> str:
    """A test case for each cell: a failure where it is worse than expected, or fails."""
    suite = ElementTree.Element("testsuite", name="compat", tests=str(len(results)))
    failures = 0
    for one in results:
        took = f"{sum(one.seconds.values()):.1f}"
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"compat.{one.tag}", name=one.megatron, time=took
        )
        if one.failure:
            failures += 1
            expected = f", expected {one.expected}" if one.expected else ""
            why = f"{one.told}{expected}{': ' + one.reason if one.reason else ''}"
            failure = ElementTree.SubElement(case, "failure", message=plain(why))
            failure.text = plain("\n".join(one.tail))
        out = ElementTree.SubElement(case, "system-out")
        out.text = plain("\n".join([one.told, *one.warnings]))
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_markdown(results: Sequence[CellResult]) -> str:
    """A table of cells, with what was expected of each, and a table of their warnings."""
    rows = []
    for one in warned(results):
        cells = ", ".join(dict.fromkeys(str(each.cell) for each in one.results))
        rows.append(_row(_logged(one.text), _cell(one.cause or "unknown"), _cell(cells)))
    head = ["", "| warning | cause | cells |", "|---|---|---|"] if rows else []
    return table(results) + "".join(f"{line}\n" for line in [*head, *rows])


def table(results: Iterable[CellResult], without: Iterable[Cell] = ()) -> str:
    """The cells, a row for each; below them the matrix's rows without a result."""
    lines = ["| tag | Megatron | verdict | expected | on | why |", "|---|---|---|---|---|---|"]
    for one in results:
        causes = "; ".join(dict.fromkeys(filter(None, map(cause, one.warnings))))
        why = _logged(one.reason) if one.reason else _cell(causes)
        mark = " (worse)" if one.worse else " (better)" if one.better else ""
        expected = f"{one.expected}{mark}" if one.expected else "-"
        cells = map(_cell, (one.tag, one.megatron, one.told, expected, one.trained_on))
        lines.append(_row(*cells, why))
    if without:
        lines += ["", f"Not tried by `matrix compat`: {', '.join(cell.tag for cell in without)}."]
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """A text of ours, or the name of a GPU, as one cell of a table."""
    return _line(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _logged(text: str) -> str:
    """A text of a log as one cell, a code span: it says nothing to Markdown, nor to GitHub.

    Readers differ on two backslashes before a pipe, of which one is the table's: a space parts
    them. (https://spec.commonmark.org/0.31.2/#code-spans, https://github.github.com/gfm/#table)
    """
    line = re.sub(r"\\(?=\|)", r"\\ ", _line(text)).replace("|", "\\|")
    runs = {len(run) for run in re.findall("`+", line)}
    fence = "`" * next(length for length in count(1) if length not in runs)
    pad = " " if runs else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def _line(text: str) -> str:
    return " ".join(plain(text).split())


def plain(text: str) -> str:
    """Text without a terminal's control sequences, and without what neither XML nor HTML can hold.

    (https://www.w3.org/TR/xml/#charsets)
    """
    told = ESCAPE.sub("", text.replace("\r\n", "\n"))
    return "".join(c for c in told if c in "\t\n" or _is_printable(ord(c)))


def _is_printable(point: int) -> bool:
    control = point < 0x20 or 0x7F <= point <= 0x9F
    return not (control or 0xD800 <= point <= 0xDFFF or point & 0xFFFE == 0xFFFE)


def load_committed(root: Path) -> list[CellResult]:
    """The committed results, none where there is no file of them."""
    path = root / RESULTS
    return from_json(path.read_text(encoding="utf-8"), RESULTS) if path.exists() else []


def merged(old: Iterable[CellResult], new: Iterable[CellResult]) -> list[CellResult]:
    """The old results with the new in place of those of the same cell on the same GPUs.

    An old one that was never asked what GPUs it had, as it failed before, makes way for any.
    """
    news = [*new]
    tried = {one.cell for one in news}
    stay = [one for one in old if one.trained_on or one.cell not in tried]
    found = {(one.tag, one.megatron, one.trained_on): one for one in [*stay, *news]}
    numbers = {
        one.megatron: [*map(int, re.findall(r"\d+", one.megatron))] for one in [*stay, *news]
    }
    return sorted(found.values(), key=lambda one: (one.tag, numbers[one.megatron], one.trained_on))


def commit(results: Iterable[CellResult], root: Path) -> Path:
    """Put results among those that are committed; the file."""
    path = root / RESULTS
    path.parent.mkdir(exist_ok=True)
    files.write(path, as_json(merged(load_committed(root), results)))
    return path
