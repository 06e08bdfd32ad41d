"""Known failures: recognises them in a log, and says what mends them.

Each line is read as its words, without prefixes, and with who says it (loglines.py). Of what is
found, a reason outranks a report of it by others, and that a summary (KINDS).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import yaml

from launcher.base.yamlfile import Loader
from launcher.runs.explain import anchors, refusals, stated
from launcher.runs.explain.loglines import LINES, LogLine, Words, by_source
from launcher.runs.explain.logreader import LogReader
from launcher.runs.plan.job import EndCause

KNOWN = Path(__file__).with_name("known")
KINDS = ("cause", "request", "stated", "report", "summary")
"""What a row describes, what outranks others first.

request: somebody asked for the end; after a failure, a report. stated: an error says itself what is
wrong. report: ranks write it also when another has failed. summary: only that something has.
"""

STATED = KINDS[2]
AFTERWARDS = KINDS[3:]  # what may be what another failure has led to
HEADS = {"cause": "cause", "clue": "this points to", "located": "where it failed"}
OPEN = "possible causes, the likeliest first, each with its cure; the list may lack the true cause"
BEFORE, AFTER = "also in the log, before it:", "what follows from it, or came after it:"
SUSPECTS = 10
MOST_WHO = 2  # tools whose errors are unknown, of which the first is a place
MOST_NEAR = 4  # lines that may say why, of a summary
NEAR = 64  # lines before an error in which its traceback is looked for
BLOCK = 8  # lines after an error that may be of its message
RAISED, CHAINED, UNCAUGHT, ENDS, LOUD, PASSING, ECHO, FAR, CRASH, INFO, FAULT = (
    re.compile(LINES[name])
    for name in "raised chained uncaught ends loud passing echo far crash info fault".split()
)
RAISED_OR_CHAINED = re.compile(f"{RAISED.pattern}|{CHAINED.pattern}", re.MULTILINE)
NOTABLE = re.compile(f"{RAISED_OR_CHAINED.pattern}|{LOUD.pattern}", re.MULTILINE)
COMMAND = re.compile(r"`([^`]+)`")  # a command in a cure


@dataclass(frozen=True)
class Failure:
    """A row of known/TOPIC.yaml: a failure, and how a log shows it.

    either: several causes, each with its cure, the likeliest first; such a row, like a report, is
    but a clue. source: threads, or who writes it. since: the first release that writes it;
    `any` for all of the matrix. says: regular expressions (MULTILINE) of lines without prefixes.
    who: whose words they are (loglines.SPEAKERS), "" for anybody's. kind: one of KINDS. raised:
    where Megatron raises what is else unknown (refusals.py). cause: the end that shows it alone
    (EndCause). sets: KEY=VALUE that `resume` has to set. of_node: a fault of the machine that
    writes it. warns: a warning may show it; an unknown error after its report outranks it. located:
    it says but where it failed; its cure is a first step. row: its name before words are in it.
    """

    name: str
    source: str
    since: str
    says: tuple[str, ...]
    topic: str
    cure: str = ""
    either: tuple[str, ...] = ()
    who: str = ""
    kind: str = KINDS[0]
    raised: str = ""
    cause: str = ""
    sets: str = ""
    of_node: bool = False
    warns: bool = False
    located: bool = False
    row: str = ""

    @property
    def follows(self) -> bool:
        """Whether it may be what another failure has led to."""
        return self.kind in AFTERWARDS

    @property
    def certainty(self) -> str:
        """cause: what failed. clue: several causes, or another's end. located: only where."""
        if self.located:
            return "located"
        return "clue" if self.either or self.follows else "cause"

    @property
    def remedy(self) -> str:
        """What mends it; of several causes all, the likeliest first."""
        return self.cure or "; or ".join(self.either)

    def overlooks(self, match: re.Match[str], text: str) -> bool:
        """Whether words of a text in which it fits say why, and its match and texts don't."""
        texts = " ".join((match[0], self.name, self.cure, *self.either))
        reasons = (own for says, own in stated.REASONS if says.search(text))
        return not self.located and not all(own.search(texts) for own in reasons)

    def filled(self, match: re.Match[str], before: list[Words]) -> Failure:
        """The row with what a match and the lines before it name in its texts, at {words}."""
        found = stated.values(match, stated.traceback(before))
        texts = (self.name, self.cure, *self.either)
        name, cure, *either = (stated.fill(one, found) for one in texts)
        return replace(self, name=name, cure=cure, either=tuple(either))


@dataclass(frozen=True)
class FailureSign:
    """A known failure that a log shows, and the lines that do; None where the end shows it.

    said: the last of them. first: the number of the first; column: where it begins there. kind: its
    row's, or `report` for a request that came after a failure.
    """

    failure: Failure
    said: LogLine | None = None
    first: int = 0
    kind: str = KINDS[0]
    column: int = 0

    @property
    def lines(self) -> list[str]:
        """The lines to print."""
        head = f"{HEADS[self.failure.certainty]}: {self.failure.name}"
        return [f"{head}: {self.said.text}" if self.said else head, *_cures(self.failure)]

    @property
    def as_dict(self) -> dict[str, Any]:
        """The same for programs."""
        known = self.failure
        same = {name: getattr(known, name) for name in ("row", "certainty", "topic", "either")}
        cure = {"cure": known.remedy, "commands": COMMAND.findall(known.remedy)}
        return {"cause": known.name, **same, **cure, "said": self.said and asdict(self.said)}


@cache
def table() -> tuple[Failure, ...]:
    """All that are known, by topic."""
    files = sorted(KNOWN.glob("*.yaml"))
    texts = [yaml.load(file.read_bytes(), Loader) for file in files]  # noqa: S506
    return tuple(
        Failure(
            **{**row, "says": tuple(row["says"]), "either": tuple(row.get("either", ()))},
            topic=text["topic"],
            row=row["name"],
        )
        for text in texts
        for row in text["rows"]
    )


@cache
def pattern(known: Failure) -> re.Pattern[str]:
    """An expression of what it says."""
    return re.compile("|".join(known.says), re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """What a log says of a failure.

    signs: the known ones, the first cause first; none where the first failure is unknown. suspects:
    lines that look most like a first cause. aftermath: what is known to follow from an unknown one.
    about: what the log says of the run. end: the number of its lines.
    """

    signs: list[FailureSign]
    suspects: list[LogLine]
    aftermath: list[FailureSign] = field(default_factory=list)
    about: dict[str, str] = field(default_factory=dict)
    end: int = 0

    @property
    def first(self) -> FailureSign | None:
        """The first cause; else the first error whose place is known, exception, or error."""
        if self.signs:
            return self.signs[0]
        known = {sign.said.line for sign in self.aftermath if sign.said}
        unknown = [one for one in self.suspects if one.line not in known]
        ends = [one for one in unknown if one.raised_by or ENDS.match(one.words)]
        near = (one for one in unknown if one.line > self.end - NEAR)
        last = [one for one in near if not PASSING.search(one.text)]
        if not ends and (not last or len({stated.who(one.words) for one in last}) > MOST_WHO):
            return None
        said = min(ends or last, key=lambda one: (not one.raised_by, not RAISED.search(one.words)))
        meaning, cure = stated.meaning(said.words, said.raised_by)
        where = Failure(said.raised_by or meaning, "", "any", (), "", cure, located=True)
        return FailureSign(where, said, said.line)

    @property
    def lines(self) -> list[str]:
        """The lines to print: the cause and its place, the cure, what may be ignored."""
        rest = ((head, *map(_named, signs)) for head, signs in self._rest.items() if signs)
        after = [*chain.from_iterable(rest)]
        if (first := self.first) is None:
            suspects = [line for said in self.suspects for line in _shown(said)]
            told = "; these lines look most like one:" if suspects else ", nor a line like one"
            return [f"no known cause{told}", *suspects, *after, *self._asking]
        known, said = first.failure, first.said
        log = [f"log: {said.where}: {said.text}", said.raised_by] if said else []
        quoted = [line for line in log if line not in ("", known.name)]
        cause = [f"{HEADS[known.certainty]}: {known.name}", *quoted, *_cures(known), *self._near]
        return [*cause, *after, *(self._asking if known.certainty != "cause" else [])]

    @property
    def _rest(self) -> dict[str, list[FailureSign]]:
        """The other known failures: what stands before the first cause, and what may follow it."""
        first, rest = self.first.first if self.first else 0, self.signs[1:] or self.aftermath
        early = [one for one in rest if one.said and one.said.line < first]
        return {BEFORE: early, AFTER: [one for one in rest if one not in early]}

    @property
    def _near(self) -> list[str]:
        """Of a summary, or a report that names no cause, the lines that may say why."""
        told = [one for one in self.signs[:1] if one.failure.follows and not one.failure.either]
        said = told[0].said if told else None
        quoted = {sign.said.text for sign in self.signs if sign.said}
        lines = [one for one in self.suspects if said and one.text not in quoted]
        return ["lines that may say why:", *chain(*map(_shown, lines[:MOST_NEAR]))] * bool(lines)

    @property
    def _asking(self) -> list[str]:
        about = ", ".join(f"{name} {value}" for name, value in self.about.items())
        return [f"to include when you ask for help: {about}"] * bool(about)

    def as_json(self) -> dict[str, Any]:
        """The same for programs: cause, its sign, commands that look or mend, what follows."""
        before, follows = ([one.as_dict for one in signs] for signs in self._rest.values())
        return {
            "causes": [self.first.as_dict] if self.first else [],
            **{"before": before, "follows": follows},
            "suspects": [] if self.signs else [asdict(said) for said in self.suspects],
            "about": self.about,
        }


def _named(sign: FailureSign) -> str:
    return f"  {sign.failure.name}" + (f" ({sign.said.where})" if sign.said else "")


def _cures(known: Failure) -> list[str]:
    if not known.either:
        return [f"{'first step' if known.located else 'cure'}: {known.cure}"]
    return [f"{OPEN}:", *(f"  {one}" for one in known.either)]


def _shown(said: LogLine) -> list[str]:
    return [f"  {said.where}: {said.text}", *([f"    {said.raised_by}"] * bool(said.raised_by))]


def explain(log: Iterable[bytes], cause: EndCause = EndCause.ITSELF) -> Explanation:
    """Read a log, in pieces of any size, for what went wrong; `cause` is who ended the run."""
    signs = {known.name: FailureSign(known) for known in table() if known.cause == cause.value}
    raised, loud = dict[str, LogLine](), dict[str, LogLine]()
    reader, lines = LogReader(log), list[Words]()
    for before, kept in reader.windows():
        lines = by_source(before + kept)
        _find(lines, signs)
        _suspect(by_source(kept), raised, loud)
    if not raised and not loud and not signs:
        raised |= _cut_off(lines)
    _place([said for said in raised.values() if not FAULT.match(said.words)], signs)
    suspects = [*raised.values(), *loud.values()][:SUSPECTS]
    suspects.sort(key=lambda said: said.line)
    ordered, unknown = _ordered(list(signs.values()), list(raised.values()))
    named, aftermath = ([], ordered) if unknown else (ordered, [])
    return Explanation(named, suspects, aftermath, reader.about, reader.end)


def _find(lines: list[Words], signs: dict[str, FailureSign]) -> None:
    """Add the failures that these lines show, and that none before them did."""
    text, starts = _joined(lines)
    parts = anchors.find(text, starts)
    for known in sorted(table(), key=lambda known: known.kind == STATED):
        if known.name not in parts or ((sign := signs.get(known.name)) and sign.said):
            continue
        spans = ((starts[one], starts[end + 1] - 1) for one, end in parts[known.name])
        for match in chain.from_iterable(pattern(known).finditer(text, *span) for span in spans):
            first = bisect_right(starts, match.start()) - 1
            last = bisect_right(starts, max(0, match.end() - 1)) - 1
            if not _may_say(lines[last], known, signs):
                continue
            whole, before = text[starts[first] : starts[last + 1]], _before(lines, last)
            if any(CHAINED.search(line.text) for line in before):
                whole += "\n".join(line.text for line in before if RAISED.match(line.text))
            if known.overlooks(match, whole):
                continue
            row, said = known.filled(match, before), _located(lines, last)
            number, column = lines[first].number, match.start() - starts[first]
            signs[known.name] = FailureSign(row, said, number, known.kind, column)
            break


def _joined(lines: list[Words]) -> tuple[str, list[int]]:
    """The lines' words, and where each begins, and one after the last would."""
    starts = accumulate((len(line.text) + 1 for line in lines), initial=0)
    return "\n".join(line.text for line in lines), [*starts]


def _may_say(line: Words, known: Failure, signs: dict[str, FailureSign]) -> bool:
    """Whether it is of the row's speakers, no warning, and for a stated error no other row's."""
    if (line.warns and not known.warns) or (known.who and line.speaker not in known.who):
        return False
    if known.kind != STATED:
        return True
    taken = (sign.first <= line.number <= sign.said.line for sign in signs.values() if sign.said)
    return bool(UNCAUGHT.match(line.text)) and not any(taken) and not _is_known(line.text)


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
    text, starts = _joined(lines)
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


def _cut_off(lines: list[Words]) -> dict[str, LogLine]:
    """Megatron's own words without their exception's name; else where a traceback is cut off."""
    for line in lines[-NEAR:]:
        if place := refusals.find(line.text):
            return {"": replace(line.quoted, raised_by=place)}
    where = stated.location(stated.traceback(lines))
    if not where:
        return {}
    ends = (at for at in range(len(lines) - 1, -1, -1) if stated.FRAME.search(lines[at].text))
    last = lines[next(ends) :][:2][-1]
    return {"": replace(last.quoted, raised_by=where)} if last.text else {}


def _before(lines: list[Words], index: int) -> list[Words]:
    """The lines before an error that may have its traceback: those since another exception."""
    begin, line = max(0, index - NEAR), lines[index]
    others = range(begin, index) if RAISED.match(line.text) else ()
    apart = (at for at in others if lines[at].number < line.number - 1)
    ends = [at for at in apart if RAISED.match(lines[at].text)]
    return lines[max(ends, default=begin) : index]


def _whole(lines: list[Words], index: int) -> Words:
    """The line; where it ends before its message, with the next, or the next that says an error."""
    line, after = lines[index], lines[index + 1 : index + BLOCK]
    goes_on = after and (line.source or after[0].number == line.number + 1)
    said = after[0].text.strip() if goes_on else ""
    if not line.text.rstrip().endswith(":") or said[:9] in ("", "Traceback"):
        return line
    errors = (
        one.text.strip() for one in after if LOUD.search(one.text) and not INFO.match(one.text)
    )
    said = next(errors, said) if INFO.match(said) else said
    return line._replace(raw=f"{line.raw.rstrip()} {said}", text=f"{line.text.rstrip()} {said}")


def _located(lines: list[Words], index: int) -> LogLine:
    """The line to quote, and where it is raised, by Megatron's words or its stack."""
    line = _whole(lines, index)
    if CRASH.search(line.text):
        return replace(line.quoted, raised_by=stated.native(lines[index : index + NEAR]))
    if not RAISED.search(line.text):
        return line.quoted
    frames = stated.traceback(_before(lines, index), line.text)
    return replace(line.quoted, raised_by=refusals.find(line.text) or stated.location(frames))


def _ordered(signs: list[FailureSign], raised: list[LogLine]) -> tuple[list[FailureSign], bool]:
    """The signs, the first cause first; and whether an unknown failure outranks mere reports.

    That is one before all of them, of a rank that wrote none, or after a mere warning.
    """
    signs = [_ranked(sign, signs, raised) for sign in signs]
    apart = [sign for sign in signs if not any(_explains(other, sign) for other in signs)]
    found = sorted(
        apart, key=lambda sign: (KINDS.index(sign.kind), sign.said.line if sign.said else 0)
    )
    if not found or found[0].kind not in AFTERWARDS or found[0].said is None:
        return found, False
    begin = float("inf") if found[0].failure.warns else min(sign.first for sign in found)
    ranks = {sign.said.rank for sign in found if sign.said}
    return found, any(
        (said.line < begin or (said.rank and said.rank not in ranks)) and not _is_known(said.text)
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
    is_more = (other.first, other.said.line) != (sign.first, sign.said.line)
    return inside and (is_summary or is_more or sign.column < other.column)


def _is_known(said: str) -> bool:
    """Whether a line is of a row, or of the network, but for errors that state what they are."""
    parts = anchors.find(said, [0, len(said) + 1])
    rows = (one for one in table() if one.name in parts and one.kind != STATED)
    found = ((one, match) for one in rows if (match := pattern(one).search(said)))
    return bool(FAR.search(said)) or not all(one.overlooks(match, said) for one, match in found)
