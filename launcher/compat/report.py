"""Results as files: JSON, JUnit XML for CI, a Markdown table; the same for the same results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from launcher.compat.result import Result, cause


def as_json(results: Sequence[Result]) -> str:
    """All that was found, with the cause of each warning where it is known."""
    told = []
    for one in results:
        causes = [{"text": text, "cause": cause(text)} for text in one.warnings]
        told.append({**asdict(one), "warnings": causes})
    return json.dumps({"cells": told}, indent=2, sort_keys=True) + "\n"


def as_junit(results: Sequence[Result]) -> str:
    """A test case for each cell: a failure where it is worse than expected, or fails."""
    suite = ElementTree.Element("testsuite", name="compat", tests=str(len(results)))
    failures = 0
    for one in results:
        took = f"{sum(one.seconds.values()):.1f}"
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"compat.{one.tag}", name=one.megatron, time=took
        )
        if is_failure(one):
            failures += 1
            failure = ElementTree.SubElement(case, "failure", message=_printable(_why(one)))
            failure.text = _printable("\n".join(one.tail))
        out = ElementTree.SubElement(case, "system-out")
        out.text = _printable("\n".join([one.told, *one.warnings]))
    suite.set("failures", str(failures))
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def is_failure(one: Result) -> bool:
    """Whether a cell fails the series: it fails unexpectedly, or is worse than expected."""
    return one.worse or (one.verdict == "fails" and one.expected is None)


def as_markdown(results: Sequence[Result]) -> str:
    """A table of cells, with what was expected of each."""
    lines = ["| tag | Megatron | verdict | expected | why |", "|---|---|---|---|---|"]
    for one in results:
        why = one.reason or "; ".join(dict.fromkeys(filter(None, map(cause, one.warnings))))
        cells = (one.tag, one.megatron, one.told, _expected(one), _cell(why))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _expected(one: Result) -> str:
    if one.expected is None:
        return "-"
    mark = " (worse)" if one.worse else " (better)" if one.better else ""
    return f"{one.expected}{mark}"


def _why(one: Result) -> str:
    expected = f", expected {one.expected}" if one.expected else ""
    return f"{one.told}{expected}{': ' + one.reason if one.reason else ''}"


def _cell(text: str) -> str:
    """Text that stays in its cell."""
    return text.replace("|", "\\|").replace("\n", " ")


def _printable(text: str) -> str:
    """Text without what XML can't hold (https://www.w3.org/TR/xml/#charsets)."""
    return "".join(c for c in text if c in "\t\n" or (ord(c) >= 0x20 and not _is_odd(ord(c))))


def _is_odd(point: int) -> bool:
    return 0xD800 <= point <= 0xDFFF or point in (0xFFFE, 0xFFFF)
