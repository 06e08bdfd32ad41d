"""Known failures: recognises them in a log, and says what mends them.

A log of any length is read in constant memory: of lines that differ in numbers and addresses
alone, as 64 ranks write them, only the first is looked at.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from launcher.base.yamlfile import Loader
from launcher.runs.plan.job import EndCause

TABLE = Path(__file__).with_name("failures.yaml")
LONGEST_QUOTE = 160
LONGEST_LINE = 1 << 16
PIECE = 1 << 22
"""Bytes of a log that are looked at together."""

CONTEXT = 64
"""Lines kept from the piece before, for what is said in several lines."""

MOST_SEEN = 1 << 18
"""Kinds of lines that are remembered; beyond that they are looked at again."""

SUSPECTS = 10
DIGITS = b"0123456789abcdef"
"""What lines may differ in and be the same: a rank, a time, an address."""

TROUBLE = re.compile(
    rb"(?i)error|fail|warn|kill|time[d]? ?out|unable|cannot|can't|could not|couldn't|mismatch|"
    rb"exception|assert|\bxid\b|no |not |nan|\.py\", line|due to|denied|unauthorized|oom|"
    rb"runner: |reason:|toomany|back-?off|invalid|loss scale|died|deadline|low on|terminate|"
    rb"undefined|abort|stopiteration|unreachable|unrecogni[sz]ed|insufficient|taint|disagree|dumped|signal"
)
"""What a line has, or its neighbour, that is looked at for known failures."""

RAISED = re.compile(r"(?:^|[\s:])(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)\b(?!\()")
LOUD = re.compile(
    r"\b(?:ERROR|FATAL|Fatal|[Ee]rror|fatal|panic|NCCL WARN|abort\w*|core dumped|[Ff]ailed)\b"
)
WARNS, LAST = "NCCL WARN ", r"(?:NCCL WARN |Last error:\n(?:\S+: )?)"
"""Where torch says NCCL's last warning, whatever NCCL_DEBUG is: a line of its own."""

COMMAND = re.compile(r"`([^`]+)`")
"""A command in a cure."""

RANK = re.compile(r"\[(?:rank|default)?(\d+)\]:|\b[Rr]ank[ =:](\d+)\b|^ *(\d+): ")
NODE = re.compile(r"^(node-\d+) \| |^([A-Za-z][\w.-]*):\d+:\d+ \[\d+\]|\bON (\S+) CANCELLED\b")
TIME = re.compile(r"\b(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?\b")


@dataclass(frozen=True)
class Failure:
    """A row of failures.yaml, which says what its keys are."""

    name: str
    cure: str
    source: str
    since: str
    says: tuple[str, ...]
    prevented: str = ""
    follows: int = 0
    cause: str = ""
    sets: str = ""


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its number from 1, its text, and the rank, node and time that it names."""

    line: int
    text: str
    rank: str = ""
    node: str = ""
    time: str = ""

    @property
    def where(self) -> str:
        """The line's number, and who wrote it when, as far as it says so."""
        rank = f"rank {self.rank}" if self.rank else ""
        return ", ".join(filter(None, (f"line {self.line}", self.node, rank, self.time)))


@dataclass(frozen=True)
class FailureSign:
    """A known failure that a log shows, and the line that does; None where the end tells it."""

    failure: Failure
    said: LogLine | None = None

    @property
    def lines(self) -> list[str]:
        """What to tell of it."""
        quoted = f": {self.said.text}" if self.said else ""
        return [f"cause: {self.failure.name}{quoted}", f"cure: {self.failure.cure}"]


@cache
def table() -> tuple[Failure, ...]:
    """All that are known."""
    return tuple(Failure(**row) for row in yaml.load(TABLE.read_bytes(), Loader))  # noqa: S506


@cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    says = ("|".join(known.says).replace(WARNS, LAST) for known in table())
    return tuple(re.compile(each, re.MULTILINE) for each in says)


@dataclass(frozen=True)
class Explanation:
    """What a log says of a failure.

    `signs` are the known ones, the first cause first and those that follow from others last;
    `suspects` the lines that look most like a first cause, as they stand in the log.
    """

    signs: list[FailureSign]
    suspects: list[LogLine]

    @property
    def lines(self) -> list[str]:
        """What to tell of it: the cause, where it is said, the cure, what may be ignored."""
        if not self.signs:
            suspects = [f"  {said.where}: {said.text}" for said in self.suspects]
            told = "; these lines look most like one:" if suspects else ", nor a line like one"
            return [f"no known cause{told}", *suspects]
        first, *rest = self.signs
        said = [f"said: {first.said.where}: {first.said.text}"] if first.said else []
        follows = [
            f"  {sign.failure.name}" + (f" ({sign.said.where})" if sign.said else "")
            for sign in rest
        ]
        return [
            f"cause: {first.failure.name}",
            *said,
            f"cure: {first.failure.cure}",
            *(["what follows from it, or came after it:", *follows] if follows else []),
        ]

    def as_json(self) -> dict[str, Any]:
        """The same for programs: cause, its sign, commands that look or mend, what follows."""
        told = [
            {
                "cause": sign.failure.name,
                "cure": sign.failure.cure,
                "commands": COMMAND.findall(sign.failure.cure),
                "said": _dict(sign.said),
            }
            for sign in self.signs
        ]
        suspects = [] if told else [_dict(said) for said in self.suspects]
        return {"causes": told[:1], "follows": told[1:], "suspects": suspects}


def _dict(said: LogLine | None) -> dict[str, Any] | None:
    return asdict(said) if said else None


def explain(log: Iterable[bytes], cause: EndCause = EndCause.ITSELF) -> Explanation:
    """Read a log, in pieces of any size, for what went wrong; `cause` is who ended the run.

    Memory is bounded, whatever the log's length; a GB of 64 ranks' lines takes some seconds.
    """
    signs = {known.name: FailureSign(known) for known in table() if known.cause == cause.value}
    raised, loud = list[LogLine](), list[LogLine]()
    seen, told, before, first = set[bytes](), set[bytes](), list[tuple[int, str]](), 1
    for piece in _pieces(log):
        kinds = piece.translate(None, DIGITS).split(b"\n")
        new = set(kinds) - seen
        seen = new if len(seen) > MOST_SEEN else seen | new
        if new and (kept := _kept(piece, kinds, new, first)):
            _look(before + kept, signs)
            for number, line in kept:
                chosen = raised if RAISED.search(line) else loud if LOUD.search(line) else None
                kind = line.encode().translate(None, DIGITS)
                if chosen is not None and len(chosen) < SUSPECTS and kind not in told:
                    told.add(kind)
                    chosen.append(_said(number, line))
            before = kept[-CONTEXT:]
        first += len(kinds)
    order = sorted(
        signs.values(), key=lambda sign: (sign.failure.follows, sign.said.line if sign.said else 0)
    )
    suspects = (raised + loud)[:SUSPECTS]
    return Explanation(order, sorted(suspects, key=lambda said: said.line))


def _pieces(log: Iterable[bytes]) -> Iterator[bytes]:
    """The log in pieces of whole lines; a line that is far too long is cut."""
    parts, size = list[bytes](), 0
    for data in log:
        parts.append(data)
        size += len(data)
        if size >= PIECE:
            whole, newline, left = b"".join(parts).rpartition(b"\n")
            yield whole if newline else left
            parts = [left] if newline else []
            size = len(left) if newline else 0
    if size:
        yield b"".join(parts).removesuffix(b"\n")


def _kept(piece: bytes, kinds: list[bytes], new: set[bytes], first: int) -> list[tuple[int, str]]:
    """The lines, with their numbers, of a kind not seen before that tell of trouble.

    Each with its neighbours.
    """
    lines = piece.split(b"\n")
    firsts = dict(zip(reversed(kinds), range(len(kinds) - 1, -1, -1), strict=True))
    at = set[int]()
    for kind in new:
        index = firsts[kind]
        if TROUBLE.search(lines[index], 0, LONGEST_LINE):
            at.update((index - 1, index, index + 1))
    return [
        (first + index, lines[index][:LONGEST_LINE].decode(errors="replace"))
        for index in sorted(at)
        if 0 <= index < len(lines)
    ]


def _look(kept: list[tuple[int, str]], signs: dict[str, FailureSign]) -> None:
    """Add the failures that these lines tell of, and that none before them did."""
    text = "\n".join(line for _, line in kept)
    starts = list(accumulate((len(line) + 1 for _, line in kept), initial=0))
    for known, pattern in zip(table(), _patterns(), strict=True):
        sign = signs.get(known.name)
        if (sign is None or sign.said is None) and (match := pattern.search(text)):
            signs[known.name] = FailureSign(
                known, _said(*kept[bisect_right(starts, match.end() - 1) - 1])
            )


def _said(number: int, line: str) -> LogLine:
    """A line as far as it fits on one of the launcher's, and what it says of itself."""
    rank, node = (
        next(filter(None, match.groups()), "") if (match := known.search(line)) else ""
        for known in (RANK, NODE)
    )
    time = match[0] if (match := TIME.search(line)) else ""
    text = line.strip()
    return LogLine(
        number,
        text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…",
        rank,
        node,
        time,
    )
