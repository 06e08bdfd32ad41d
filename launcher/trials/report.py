"""Results as files: JSON, JUnit XML for CI, Markdown; the same for the same results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from itertools import count
from xml.etree import ElementTree

from launcher.errors import UsageError
from launcher.trials.result import Result, cause, warned

ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])?")
"""A terminal's control sequence (ECMA-48, 5.4 and 5.6): colours, titles, links."""


def as_json(results: Sequence[Result]) -> str:
    """All that was found, with the cause of each warning where it is known."""
    told = []
    for one in results:
        causes = [{"text": text, "cause": cause(text)} for text in one.warnings]
        told.append({**asdict(one), "warnings": causes})
    return json.dumps({"cells": told}, indent=2, sort_keys=True) + "\n"


def from_json(text: str, source: str) -> list[Result]:
    """The results in what `as_json` wrote. Raises UsageError, naming `source`, for another text."""
    try:
        found = [
            Result(**{**told, "warnings": tuple(one["text"] for one in told["warnings"])})
            for told in json.loads(text)["cells"]
        ]
        return [replace(one, tail=tuple(one.tail)) for one in found]
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"{source}: not a report.json of `matrix compat`: {type(error).__name__}: {error}",
            "Take it from the repository again.",
        ) from error


def as_junit(results: Sequence[Result]) -> str:
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
            failure = ElementTree.SubElement(case, "failure", message=plain(_why(one)))
            failure.text = plain("\n".join(one.tail))
        out = ElementTree.SubElement(case, "system-out")
        out.text = plain("\n".join([one.told, *one.warnings]))
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def as_markdown(results: Sequence[Result]) -> str:
    """A table of cells, with what was expected of each, and a table of their warnings."""
    told = warned(results)
    return table(results) + (f"\n{_warnings(results)}" if told else "")


def table(results: Iterable[Result]) -> str:
    """The cells, a row for each."""
    lines = ["| tag | Megatron | verdict | expected | on | why |", "|---|---|---|---|---|---|"]
    for one in results:
        causes = "; ".join(dict.fromkeys(filter(None, map(cause, one.warnings))))
        why = _logged(one.reason) if one.reason else _cell(causes)
        cells = map(_cell, (one.tag, one.megatron, one.told, _expected(one), one.on))
        lines.append(_row(*cells, why))
    return "\n".join(lines) + "\n"


def _warnings(results: Iterable[Result]) -> str:
    lines = ["| warning | cause | cells |", "|---|---|---|"]
    for one in warned(results):
        cells = ", ".join(dict.fromkeys(str(each.cell) for each in one.results))
        lines.append(_row(_logged(one.text), _cell(one.cause or "unknown"), _cell(cells)))
    return "\n".join(lines) + "\n"


def _expected(one: Result) -> str:
    if one.expected is None:
        return "-"
    mark = " (worse)" if one.worse else " (better)" if one.better else ""
    return f"{one.expected}{mark}"


def _why(one: Result) -> str:
    expected = f", expected {one.expected}" if one.expected else ""
    return f"{one.told}{expected}{': ' + one.reason if one.reason else ''}"


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
