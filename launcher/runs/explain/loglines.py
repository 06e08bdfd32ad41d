"""Lines of a log: their words without prefixes, who says them, on which rank and node, and when."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from launcher.base.yamlfile import Loader

LONGEST_QUOTE = 320
MOST_PREFIXES = 8  # before a line's words; what has more is prose

LINES: dict[str, Any] = yaml.load(Path(__file__).with_name("lines.yaml").read_bytes(), Loader)  # noqa: S506
PREFIX = re.compile(LINES["prefix"], re.VERBOSE)
RANK, NODE, TIME, WARNING, IGNORED = (
    re.compile(LINES[name]) for name in ("rank", "node", "time", "warning", "ignored")
)
OLD_WARNING = re.compile(r"(\b\w+\.(?:cc|cu|h):\d+) WARN ")
ESCAPED = re.compile(r'\\+"')  # a quote in a message that an engine passed on as a string
LAST_ERROR = "Last error:"
WARNS = "NCCL WARN "
"""NCCL's warning; torch repeats the last one, whatever NCCL_DEBUG is, in a line of its own."""

SPEAKERS = tuple((name, re.compile(begins)) for name, begins in LINES["speakers"].items())
"""Who says a line, by how its words begin; all others are the program's, or a library's in it."""

PROGRAM = "program"


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its number from 1, its text, and the rank, node and time that it names.

    raised_by: where in Megatron, and for which options, "" where that isn't known.
    """

    line: int
    text: str
    rank: str = ""
    node: str = ""
    time: str = ""
    raised_by: str = ""

    @property
    def words(self) -> str:
        """Its text without prefixes."""
        return parse(self.line, self.text).text

    @property
    def where(self) -> str:
        """The line's number, and who wrote it when, as far as it says so."""
        rank = f"rank {self.rank}" if self.rank else ""
        return ", ".join(filter(None, (f"line {self.line}", self.node, rank, self.time)))


class Words(NamedTuple):
    """A line: its number from 1, the whole line, its words alone, and which rank wrote it."""

    number: int
    raw: str
    text: str
    source: str = ""

    @property
    def speaker(self) -> str:
        """Who says it: runner, nccl, ucx, scheduler, engine, kernel, shell or program."""
        text = self.text.lstrip()
        return next((name for name, begins in SPEAKERS if begins.match(text)), PROGRAM)

    @property
    def warns(self) -> bool:
        """Whether it calls itself a warning."""
        return bool(WARNING.search(self.raw))

    @property
    def quoted(self) -> LogLine:
        """The line, without its middle where it is long, and what it says of itself."""
        rank, node = (
            next(filter(None, match.groups()), "") if (match := known.search(self.raw)) else ""
            for known in (RANK, NODE)
        )
        time = match[0] if (match := TIME.search(self.raw)) else ""
        text = self.raw.strip()
        text = text if len(text) <= LONGEST_QUOTE else f"{text[:190]} … {text[-130:]}"
        return LogLine(self.number, text, rank, node, time)


def parse(number: int, raw: str) -> Words:
    """The words of a line, and its source: the rank or node that a prefix names, "" for none."""
    at, source = 0, ""
    for _ in range(MOST_PREFIXES):
        if not (match := PREFIX.match(raw, at)) or match.end() == at:
            break
        at, source = match.end(), source + (match["rank"] or "")
    text = raw[at + 1 :] if raw[at : at + 1] == " " else raw[at:]
    if '\\"' in text:
        text = ESCAPED.sub('"', text)
    if " WARN " in text:
        text = OLD_WARNING.sub(r"\1 NCCL WARN ", text, count=1)
    return Words(number, raw, text, source)


def by_source(lines: list[Words]) -> list[Words]:
    """The lines by rank, NCCL's warnings that torch repeats as its own, ignored errors emptied."""
    groups: dict[str, list[Words]] = {}
    for line in lines:
        groups.setdefault(line.source, []).append(line)
    ordered = [line for group in groups.values() for line in group]
    ignored, source = False, ""
    for index, line in enumerate(ordered):
        ignored, source = ignored and line.source == source, line.source
        goes_on = ignored and line.text.startswith((" ", "Traceback"))
        if ignored and not goes_on and "killed by signal" not in line.text:
            ordered[index] = line._replace(text="")
        ignored = goes_on or bool(IGNORED.match(line.text))
    for index, (before, line) in enumerate(pairwise(ordered), start=1):
        if before.text.strip() == LAST_ERROR and not line.text.startswith(WARNS):
            ordered[index] = Words(line.number, line.raw, WARNS + line.text, line.source)
    return ordered
