"""Known failures: recognises them in a log, and says what mends them.

Each line is read as its words, without prefixes, and with who says it (loglines.py). Of what is
found, a reason outranks a report of it by others, and that a summary (KINDS).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from launcher.base.yamlfile import Loader
from launcher.runs.explain import anchors, refusals
from launcher.runs.explain.loglines import LogLine, Words, by_source
from launcher.runs.explain.logreader import LogReader
from launcher.runs.plan.job import EndCause

KNOWN = Path(__file__).with_name("known")
KINDS = ("cause", "request", "report", "summary")
"""What a row describes, what outranks others first.

request: somebody asked for the end; where something failed before, it is a report. report: ranks
write it as well when another, or another node, has failed. summary: only that something has.
"""

AFTERWARDS = KINDS[2:]
"""What may be what another failure has led to."""

SUSPECTS = 10
RAISED = re.compile(
    r"(?:^|[\s:])(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*(?:Error|Exception)\b(?!\()|Exception(?=: ))"
)
LOUD = re.compile(
    r"\b(?:ERROR|FATAL|Fatal|[Ee]rror|fatal|panic|NCCL WARN|abort\w*|core dumped|[Ff]ailed)\b"
)
CHAINED = re.compile(r"During handling of the above exc|the direct cause of the following exc")
RAISED_OR_CHAINED = re.compile(f"{RAISED.pattern}|{CHAINED.pattern}", re.MULTILINE)
NOTABLE = re.compile(f"{RAISED_OR_CHAINED.pattern}|{LOUD.pattern}", re.MULTILINE)
ECHO = re.compile(r"ChildFailedError|^ {4}|^\s*(?:raise|except) |\bfailed \(exitcode: 1\)")
"""What says only that something failed elsewhere, and code."""

FAR = re.compile(
    r"NCCL|\bc10d\b|TCPStore|[Gg]loo\b|[Rr]endezvous|\bDist\w+Error|[Cc]onnection |[Ss]ocket"
)
"""In an exception: it may be of another's failure, whichever its row."""

FRAME = re.compile(r'File "\S*?(megatron/\S+)\.py", line \d+, in (\w+)')
COMMAND = re.compile(r"`([^`]+)`")
"""A command in a cure."""


@dataclass(frozen=True)
class Failure:
    """A row of known/FAMILY.yaml: a failure, and how a log shows it.

    name: what failed, in a few words. cure: what mends it. source: threads that report it, or who
    writes it. since: the first release that writes one of its texts, by its sources; `any`
    where all do that the matrix has. says: regular expressions (MULTILINE) of lines without their
    prefixes; one is in its output. who: whose words they are (loglines.SPEAKERS), "" for anybody's.
    kind: one of KINDS. raised: an expression of where Megatron raises what is else unknown
    (refusals.py). cause: the end that shows it alone, where nothing was written (EndCause). sets:
    KEY=VALUE that `resume` has to set, so that it does not fail so again. of_node: whether it is a
    fault of the machine that writes it.
    """

    name: str
    cure: str
    source: str
    since: str
    says: tuple[str, ...]
    family: str
    who: str = ""
    kind: str = KINDS[0]
    raised: str = ""
    cause: str = ""
    sets: str = ""
    of_node: bool = False

    @property
    def follows(self) -> bool:
        """Whether it may be what another failure has led to."""
        return self.kind in AFTERWARDS


@dataclass(frozen=True)
class FailureSign:
    """A known failure that a log shows, and the lines that do; None where the end shows it.

    said: the last of them. first: the number of the first. kind: its row's, or `report` for a
    request that came after a failure.
    """

    failure: Failure
    said: LogLine | None = None
    first: int = 0
    kind: str = KINDS[0]

    @property
    def lines(self) -> list[str]:
        """The lines to print."""
        quoted = f": {self.said.text}" if self.said else ""
        return [f"cause: {self.failure.name}{quoted}", f"cure: {self.failure.cure}"]


@cache
def table() -> tuple[Failure, ...]:
    """All that are known, by family."""
    files = sorted(KNOWN.glob("*.yaml"))
    texts = [yaml.load(file.read_bytes(), Loader) for file in files]  # noqa: S506
    rows = (
        {**row, "says": tuple(row["says"]), "family": text["family"]}
        for text in texts
        for row in text["rows"]
    )
    return tuple(Failure(**row) for row in rows)


@cache
def pattern(known: Failure) -> re.Pattern[str]:
    """An expression of what it says."""
    return re.compile("|".join(known.says), re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """What a log says of a failure.

    `signs` are the known ones, the first cause first and those that follow from others last; none
    where the first failure is unknown. `suspects` are the lines that look most like a first cause,
    `aftermath` what is known to follow from an unknown one, and `about` what the log says of the
    run: releases, GPUs, layout, the last iteration.
    """

    signs: list[FailureSign]
    suspects: list[LogLine]
    aftermath: list[FailureSign] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The lines to print: the cause and its place, the cure, what may be ignored."""
        rest = self.signs[1:] or self.aftermath
        follows = [
            f"  {sign.failure.name}" + (f" ({sign.said.where})" if sign.said else "")
            for sign in rest
        ]
        after = ["what follows from it, or came after it:", *follows] if follows else []
        if not self.signs:
            suspects = [line for said in self.suspects for line in _shown(said)]
            told = "; these lines look most like one:" if suspects else ", nor a line like one"
            return [f"no known cause{told}", *suspects, *after, *self._asking]
        first = self.signs[0]
        said = [f"log: {first.said.where}: {first.said.text}"] if first.said else []
        raised = [first.said.raised_by] if first.said and first.said.raised_by else []
        cause = [f"cause: {first.failure.name}", *said, *raised, f"cure: {first.failure.cure}"]
        return [*cause, *after]

    @property
    def _asking(self) -> list[str]:
        if not self.about:
            return []
        told = ", ".join(f"{name} {value}" for name, value in self.about.items())
        return [f"for a question to others, the log says of the run: {told}"]

    def as_json(self) -> dict[str, Any]:
        """The same for programs: cause, its sign, commands that look or mend, what follows."""
        first, rest = self.signs[:1], self.signs[1:] or self.aftermath
        return {
            "causes": [_as_dict(sign) for sign in first],
            "follows": [_as_dict(sign) for sign in rest],
            "suspects": [] if first else [asdict(said) for said in self.suspects],
            "about": self.about,
        }


def _shown(said: LogLine) -> list[str]:
    return [f"  {said.where}: {said.text}", *([f"    {said.raised_by}"] * bool(said.raised_by))]


def _as_dict(sign: FailureSign) -> dict[str, Any]:
    return {
        "cause": sign.failure.name,
        "family": sign.failure.family,
        "cure": sign.failure.cure,
        "commands": COMMAND.findall(sign.failure.cure),
        "said": asdict(sign.said) if sign.said else None,
    }


def explain(log: Iterable[bytes], cause: EndCause = EndCause.ITSELF) -> Explanation:
    """Read a log, in pieces of any size, for what went wrong; `cause` is who ended the run.

    Memory is bounded, whatever the log's length; a GB of 64 ranks' lines takes some seconds.
    """
    signs = {known.name: FailureSign(known) for known in table() if known.cause == cause.value}
    raised, loud = dict[str, LogLine](), dict[str, LogLine]()
    reader = LogReader(log)
    for before, kept in reader.windows():
        _find(by_source(before + kept), signs)
        _suspect(by_source(kept), raised, loud)
    _place(list(raised.values()), signs)
    suspects = [*raised.values(), *loud.values()][:SUSPECTS]
    ordered, unknown = _ordered(list(signs.values()), list(raised.values()))
    return Explanation(
        [] if unknown else ordered,
        sorted(suspects, key=lambda said: said.line),
        ordered if unknown else [],
        reader.about,
    )


def _find(lines: list[Words], signs: dict[str, FailureSign]) -> None:
    """Add the failures that these lines show, and that none before them did."""
    text = "\n".join(line.text for line in lines)
    starts = list(accumulate((len(line.text) + 1 for line in lines), initial=0))
    parts = anchors.find(text, starts)
    for known in table():
        sign = signs.get(known.name)
        if known.name not in parts or (sign is not None and sign.said is not None):
            continue
        for match in _matches(known, text, starts, parts[known.name]):
            first, last = (
                bisect_right(starts, at) - 1 for at in (match.start(), max(0, match.end() - 1))
            )
            if not known.who or lines[last].speaker in known.who:
                said = _located(lines, last)
                signs[known.name] = FailureSign(known, said, lines[first].number, known.kind)
                break


def _matches(
    known: Failure, text: str, starts: list[int], parts: list[tuple[int, int]]
) -> Iterator[re.Match[str]]:
    """Where a row matches in these parts of a text, each its first and last line."""
    says = pattern(known)
    for first, last in parts:
        yield from says.finditer(text, starts[first], starts[last + 1] - 1)


def _place(raised: list[LogLine], signs: dict[str, FailureSign]) -> None:
    """Add the failures known by the place at which Megatron raises an unknown message."""
    told = [sign.said.line for sign in signs.values() if sign.said]
    for known in table():
        for said in raised if known.raised and known.name not in signs else ():
            if said.line not in told and re.match(known.raised, said.raised_by):
                signs[known.name] = FailureSign(known, said, said.line, known.kind)
                break


def _suspect(lines: list[Words], raised: dict[str, LogLine], loud: dict[str, LogLine]) -> None:
    """Add the lines that look like a first cause: of chained exceptions the first, and errors."""
    text = "\n".join(line.text for line in lines)
    starts = list(accumulate((len(line.text) + 1 for line in lines), initial=0))
    chained, at = False, 0
    while len(raised) < SUSPECTS:
        notable = NOTABLE if len(loud) < SUSPECTS else RAISED_OR_CHAINED
        if (found := notable.search(text, at)) is None:
            return
        index = bisect_right(starts, found.end() - 1) - 1
        line, at = lines[index], starts[index + 1]
        chained = chained or bool(CHAINED.search(line.text))
        is_raised = bool(RAISED.search(line.text))
        if ECHO.search(line.text) or not (is_raised or LOUD.search(line.text)):
            continue
        if is_raised and chained:
            chained = False
            continue
        chosen, kind = raised if is_raised else loud, re.sub(r"[\da-f]+", "", line.text)
        if kind not in chosen and len(chosen) < SUSPECTS:
            chosen[kind] = _located(lines, index)


def _located(lines: list[Words], index: int) -> LogLine:
    """The line to quote, and where Megatron raises it, by its words or its stack."""
    line = lines[index]
    if not RAISED.search(line.text):
        return line.quoted
    where = refusals.find(line.text)
    if not where:
        before = (FRAME.search(one.text) for one in reversed(lines[max(0, index - 40) : index]))
        frame = next(filter(None, before), None)
        where = f"raised under {frame[2]} of {frame[1]}.py" if frame else ""
    return replace(line.quoted, raised_by=where)


def _ordered(signs: list[FailureSign], raised: list[LogLine]) -> tuple[list[FailureSign], bool]:
    """The signs, the first cause first; and whether an unknown failure outranks them.

    That is one before all of them, or of a rank that wrote none, where all are others' reports:
    the output of several nodes isn't in the order in which it was written.
    """
    signs = [_ranked(sign, signs, raised) for sign in signs]
    apart = [sign for sign in signs if not any(_explains(other, sign) for other in signs)]
    found = sorted(
        apart, key=lambda sign: (KINDS.index(sign.kind), sign.said.line if sign.said else 0)
    )
    if not found or found[0].kind not in AFTERWARDS or found[0].said is None:
        return found, False
    begin, ranks = (
        min(sign.first for sign in found),
        {sign.said.rank for sign in found if sign.said},
    )
    return found, any(
        (said.line < begin or (said.rank and said.rank not in ranks)) and not _is_known(said)
        for said in raised
    )


def _ranked(sign: FailureSign, signs: list[FailureSign], raised: list[LogLine]) -> FailureSign:
    """The sign; a request is a report where something had failed before it."""
    before = [said.line for said in raised] + [one.first for one in signs if one.failure.follows]
    if sign.kind == "request" and any(0 < line < sign.first for line in before):
        return replace(sign, kind="report")
    return sign


def _explains(other: FailureSign, sign: FailureSign) -> bool:
    """Whether another sign explains this one's lines, and more, or this is but their summary."""
    is_summary = KINDS.index(other.kind) < KINDS.index(sign.kind) == len(KINDS) - 1
    if sign.said is None or other.said is None or (other.failure.follows and not is_summary):
        return False
    inside = other.first <= sign.first and sign.said.line <= other.said.line
    return inside and (is_summary or _extent(other) > _extent(sign))


def _extent(sign: FailureSign) -> int:
    """The lines after the first that it explains."""
    return max(0, sign.said.line - sign.first) if sign.said else 0


def _is_known(said: LogLine) -> bool:
    parts = anchors.find(said.text, [0, len(said.text) + 1])
    known = (one for one in table() if one.name in parts)
    return bool(FAR.search(said.text)) or any(pattern(one).search(said.text) for one in known)
