"""What a run took, by its record: a step, memory, and where its hours went.

A line of the log says how long its iterations took and, to the second, when it was written. Our
program counts a save or an evaluation that follows a line into the next one; upstream's stops its
clock meanwhile, so that it lies between two lines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import accumulate
from math import inf
from statistics import median
from typing import Any

from launcher.runs.records import metrics, plot, record
from launcher.tools.forecast import timing
from launcher.tools.forecast import work as works
from launcher.tools.forecast.work import Work

FOREIGN = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""What a record raises that another program, or another version, has written."""

START, STEPS, WARM_UP, SLOW, DATA = "start", "steps", "first steps", "slower steps", "data"
SAVES, EVALUATIONS, AGAIN = "saves", "evaluations", "done again"
RESTARTS, HANGS, END = "restarts", "hangs", "end"
PARTS = (START, WARM_UP, STEPS, SLOW, DATA, SAVES, EVALUATIONS, AGAIN, RESTARTS, HANGS, END)
"""Where a run's seconds go. Start: until the first step; first steps: what those of a process take
more than others, as they compile; slower steps: what others take more than most; done again:
steps that a restart lost; end: after the last line, with the last save and evaluation."""

MEANING = {
    WARM_UP: "compiling, warming up",
    SLOW: "more than most steps took",
    AGAIN: "lost by restarts",
    END: "the last save and evaluation too",
}

STAMPS = 1.5
"""Seconds by which two lines' times may be apart from the time between them: they have no more."""

ZONE = 900
"""Seconds of which time zones are multiples: a container's log has its own."""

MIB = 1 << 20


@dataclass(frozen=True)
class RunFact:
    """What a run took. `place` is what it ran on: a GPU's name, or a machine's on the CPU.

    whole: whether `seconds` and the counts are of all of it, and not of its newest lines
    ms: of most steps; mean_ms: of all, but for what `seconds` has under other names than steps,
    slower steps and data; spread: the ms that a tenth of the lines were below, and above
    """

    run: str
    work: Work
    place: str
    created: str
    ms: float
    mean_ms: float
    spread: tuple[float, float]
    iterations: int
    tokens: int
    saves: int
    evaluations: int
    seconds: Mapping[str, float] = field(hash=False)
    allocated: float | None = None
    reserved: float | None = None
    joules: float | None = None
    attempts: int = 1
    outcome: str = ""
    knows_data: bool = False
    whole: bool = True
    links: Mapping[str, float] = field(default_factory=dict, hash=False)
    """GB/s for each GPU that its ranks measured before the start, by MACHINE and NETWORK."""

    @property
    def total(self) -> float:
        """Seconds from its start to its end."""
        return sum(self.seconds.values())


@dataclass(frozen=True)
class _Line:
    """A line of training: its iterations, their ms, when it was written, and seconds before it."""

    first: int
    last: int
    ms: float
    time: datetime | None
    gap: float = 0.0
    data: float = 0.0

    @property
    def count(self) -> int:
        return self.last - self.first

    @property
    def seconds(self) -> float:
        return self.count * self.ms / 1000


def of_run(run: str, most: int = 0) -> RunFact | None:
    """What a run took by its record; None where that doesn't say it, as before its second line.

    `most` are the bytes to read of its metrics, the newest; 0 for all.
    """
    kept = record.load(run, record.folder(run) / record.FILE)
    if kept is None:
        return None
    path = record.folder(run) / record.METRICS
    found = [*record.newest_lines(path, most)][::-1] if most else [*record.read_lines(path)]
    endings = [*record.read_lines(record.folder(run) / record.ENDINGS)]
    plan, facts = record.read(run, record.PLAN) or {}, record.read(run, record.FACTS) or {}
    try:
        done = works.of_record(plan, kept.config)
        fact = _fact(kept, done, place(facts, on_cpu=done.on_cpu), found, endings)
        links = _links(facts)
    except FOREIGN:
        return None
    return replace(fact, whole=not most, links=links) if fact else None


def _links(facts: Mapping[str, Any]) -> dict[str, float]:
    """GB/s of a GPU's links: those of a machine share what goes beyond it."""
    return {
        reach: rate
        for reach, link in (facts.get("links") or {}).items()
        if 0 < (rate := link["gb_s"] / (link["ranks"] if reach == timing.NETWORK else 1)) < inf
    }


def place(facts: Mapping[str, Any], *, on_cpu: bool) -> str:
    """What a run ran on, by its facts, of a scheduler's machines by what its ranks measured; ""
    where they don't say it."""
    if on_cpu:
        host = facts.get("host") or {}
        return f"{host.get('name')} with {host.get('cpus')} CPUs" if host else ""
    machine = facts.get("machine") or {}
    names = {str(gpu["name"] or "") for gpu in machine.get("gpus") or ()}
    names = names or {str(link["gpu"]) for link in (facts.get("links") or {}).values()}
    return names.pop() if len(names) == 1 else ""


def _fact(
    kept: record.Record,
    done: Work,
    where: str,
    found: Sequence[dict[str, Any]],
    endings: Sequence[Mapping[str, Any]],
) -> RunFact | None:
    steps = [each for each in found if each["kind"] == plot.STEP]
    whole = {(e["attempt"], e["iteration"]) for e in plot.continued(found)}
    attempts = sorted({each["attempt"] for each in steps})
    lines = {at: [*_lines([e for e in steps if e["attempt"] == at])] for at in attempts}
    validated = sorted({each["iteration"] for each in found if each["kind"] == plot.VALIDATION})
    plain = [
        line
        for at in attempts
        for number, line in enumerate(lines[at])
        if number and not (_saves(done, line) or _evaluated(validated, line))
    ]
    plain = plain or [line for at in attempts for line in lines[at][1:]]
    if not plain:
        return None
    if not 0 < (ms := _median(plain)) < inf:
        return None
    hidden = timing.starts(done) in ("kernels", *timing.COMPILED)  # behind the GPU's work
    waits = 0.0 if hidden else median(line.data / line.count for line in plain)
    spent = _TimeSum(done, validated, ms, ms / 1000 - waits)
    begun = datetime.fromisoformat(kept.created)
    for at in attempts:
        ending = next((one for one in endings if one.get("attempt") == at), {})
        ended = datetime.fromisoformat(ending["ended"]) if ending.get("ended") else None
        again = {line for line in lines[at] if (at, line.last) not in whole}
        spent.attempt(at, lines[at], again, begun, ended, str(ending.get("by", "")))
        begun = ended or begun
    kept_lines = sum(line.count for at in attempts for line in lines[at]) - spent.lost
    memory = [each for each in found if each["kind"] == metrics.KINDS[metrics.MemoryUse]]
    some = sorted(line.ms for line in plain)
    paced = sum(spent.seconds[part] for part in (STEPS, SLOW, DATA))
    return RunFact(
        run=kept.run,
        work=done,
        place=where,
        created=kept.created,
        ms=ms,
        mean_ms=1000 * paced / max(1, kept_lines),
        spread=(some[len(some) // 10], some[-1 - len(some) // 10]),
        iterations=kept_lines,
        tokens=_samples(steps, kept_lines * done.batch) * (done.number("seq_length")),
        saves=spent.saves,
        evaluations=spent.evaluations,
        seconds=spent.seconds,
        allocated=_most(memory, "max_allocated_mib"),
        reserved=_most(memory, "max_reserved_mib", "device_mib"),
        joules=_joules(steps, lines, done),
        attempts=len({*attempts, *(one.get("attempt", 0) for one in endings)}),
        outcome=str(endings[-1].get("outcome", "")) if endings else "",
        knows_data=any(each.get("data_ms") is not None for each in steps),
    )


def _lines(steps: Sequence[Mapping[str, Any]]) -> Iterator[_Line]:
    """An attempt's lines, in their order; the first one's length is the second's."""
    ends = [each["iteration"] for each in steps]
    before = max(0, 2 * ends[0] - ends[1]) if len(ends) > 1 else ends[0] - 1
    was: datetime | None = None
    for begin, each in zip([before, *ends], steps, strict=False):
        time = _time(each.get("time"))
        line = _Line(begin, each["iteration"], float(each["ms_per_step"]), time)
        gap = (time - was).total_seconds() - line.seconds if time and was else 0.0
        waited = float(each.get("data_ms") or 0) * line.count / 1000
        yield _Line(line.first, line.last, line.ms, time, gap if gap > STAMPS else 0.0, waited)
        was = time


def _time(text: object) -> datetime | None:
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(f"{text}+00:00")
    return None


def _saves(work: Work, line: _Line) -> int:
    """Saves between a line and the one before: those after an iteration from the last one's on."""
    every = work.number("save_interval") if work.options.get("save") else 0
    return (line.last - 1) // every - (line.first - 1) // every if every and line.first else 0


def _evaluated(validated: Sequence[int], line: _Line) -> int:
    """Evaluations, of those after these iterations in their order, that a line has in it."""
    return bisect_left(validated, line.last) - bisect_left(validated, line.first)


def _median(lines: Sequence[_Line]) -> float:
    """ms of the iteration in the middle."""
    some = sorted(lines, key=lambda line: line.ms)
    counts = [*accumulate(max(0, line.count) for line in some)]
    return some[bisect_left(counts, counts[-1] / 2)].ms


class _TimeSum:
    """Adds up where the seconds of a run's attempts went."""

    def __init__(self, work: Work, validated: Sequence[int], ms: float, usual: float) -> None:
        """`usual`: a step's seconds without its wait for data, where that isn't hidden."""
        self.work, self.validated, self.ms, self.usual = work, validated, ms, usual
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.saves = self.evaluations = self.lost = 0
        self.each = 0.0  # seconds of an evaluation

    def attempt(
        self,
        number: int,
        lines: Sequence[_Line],
        again: Collection[_Line],
        begun: datetime,
        ended: datetime | None,
        by: str,
    ) -> None:
        """Add an attempt that began and ended then: its lines, of which `again` were lost."""
        alone = [line for line in lines if _evaluated(self.validated, line)]
        alone = [line for line in alone if not _saves(self.work, line)]
        if alone:
            self.each = median(
                self._more(line) / _evaluated(self.validated, line) for line in alone
            )
        for at, line in enumerate(lines):
            if line in again:
                self.seconds[AGAIN] += line.seconds + line.gap
                self.lost += line.count
            else:
                self._line(line, is_first=not at)
        first = lines[0]
        if first.time is None or lines[-1].time is None:
            return
        shift = _shift(first, lines[-1], begun, ended)
        waited = (first.time + shift - begun).total_seconds() - first.seconds
        self.seconds[RESTARTS if number else START] += max(0.0, waited)
        if ended:
            rest = max(0.0, (ended - lines[-1].time - shift).total_seconds())
            self.seconds[HANGS if by == "the watchdog" else END] += rest

    def _more(self, line: _Line, *, plain: bool = False) -> float:
        """Seconds that a line took beside its steps' usual ones and its waits for data."""
        alone = line.seconds - self._data(line, plain=plain)
        return max(0.0, alone - line.count * self.usual) + line.gap

    def _data(self, line: _Line, *, plain: bool = False) -> float:
        """Seconds lost by waiting for data.

        Where the GPU works meanwhile, only what a line took more that has nothing else in it.
        """
        if self.usual * 1000 != self.ms:
            return min(line.data, line.seconds)
        return min(line.data, max(0.0, line.seconds - line.count * self.usual)) if plain else 0.0

    def _line(self, line: _Line, *, is_first: bool) -> None:
        saves, evaluated = _saves(self.work, line), _evaluated(self.validated, line)
        plain = not (is_first or saves or evaluated)
        more, data = self._more(line, plain=plain), self._data(line, plain=plain)
        self.saves += saves
        self.evaluations += evaluated
        self.seconds[DATA] += data
        self.seconds[STEPS] += line.seconds + line.gap - more - data
        if is_first:
            self.seconds[WARM_UP] += more
        elif saves and evaluated:
            share = min(more, evaluated * (self.each or self.ms / 1000 * self._passes))
            self.seconds[EVALUATIONS] += share
            self.seconds[SAVES] += more - share
        elif saves or evaluated:
            self.seconds[SAVES if saves else EVALUATIONS] += more
        else:
            self.seconds[SLOW] += more

    @property
    def _passes(self) -> float:
        """Steps that an evaluation is like: a third of a step goes forward."""
        return self.work.number("eval_iters", 100) / 3


def _shift(first: _Line, last: _Line, begun: datetime, ended: datetime | None) -> timedelta:
    """What to add to an attempt's times, which are of a zone of their own, to have UTC.

    The least with which its first line comes after its beginning and its last before its end.
    """
    assert first.time
    assert last.time
    early = (first.time - begun).total_seconds() - first.seconds
    shift = timedelta(seconds=-ZONE * int((early + 1) // ZONE))
    if ended and last.time + shift > ended + timedelta(seconds=STAMPS):
        return min(shift, ended - last.time)
    return shift


def _samples(steps: Sequence[Mapping[str, Any]], counted: int) -> int:
    """Sequences that were trained on and kept: by the log where it counts them."""
    told = [each["samples"] for each in steps if each.get("samples")]
    if not told or not steps[0].get("global_batch_size"):
        return counted
    return int(min(counted, told[-1]) if counted else told[-1])


def _most(memory: Sequence[Mapping[str, Any]], *names: str) -> float | None:
    """Bytes of the rank that had most."""
    found = [each[name] for each in memory for name in names if each.get(name)]
    return max(found) * MIB if found else None


def _joules(
    steps: Sequence[Mapping[str, Any]], lines: Mapping[int, Sequence[_Line]], work: Work
) -> float | None:
    """Energy of all GPUs as the log has it of each step, lost ones too; None where it hasn't."""
    counts = {(at, line.last): line for at, some in lines.items() for line in some}
    total = 0.0
    for each in steps:
        line = counts[each["attempt"], each["iteration"]]
        if (joules := each.get("energy_j")) is None and each.get("power_w") is not None:
            joules = each["power_w"] * line.ms / 1000
        if joules is None:
            return None
        total += joules * line.count
    return total * work.where.world or None
