"""Finds which differences make a run fail, by halving. Pure: `ask` is what tries a point.

A point has a position on each axis: 0 is GOOD's value, the last is BAD's. A package or a key has
two positions; commits, releases and rows have one for each that lies between.

The path from one point to another goes along the first axis, then along the second, and so on.
Halving finds two neighbours on it, of which the first is good and the second fails. Whether their
difference is enough is tried on GOOD alone. Where it isn't, it needs others, which are found the
same way: on GOOD with that difference (Junker, QuickXplain, AAAI 2004, takes the same steps).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum


class Verdict(Enum):
    """What a trial showed; SKIPPED where it couldn't be tried, or failed in another way."""

    GOOD = "good"
    BAD = "bad"
    SKIPPED = "skipped"


Point = tuple[int, ...]
Ask = Callable[[Point], Verdict]
"""Tries a point, or knows what came of it."""


class EndsAlikeError(Exception):
    """Raised where the two ends don't differ: `end` is the one that isn't as it should be."""

    def __init__(self, end: Point, verdict: Verdict) -> None:
        super().__init__(end)
        self.end, self.verdict = end, verdict


@dataclass(frozen=True)
class AxisStep:
    """An axis whose step from `good` to `bad` is needed for the failure.

    They are neighbours, but where nothing between them could be tried, or not apart from another
    axis: `good` is then where the way began, as nothing nearer was tried with the other's BAD.
    """

    axis: int
    good: int
    bad: int


@dataclass(frozen=True)
class SearchResult:
    """What makes the run fail.

    groups: each is needed; a group has several differences where these couldn't be tried apart.
    good, bad: neighbours, of which the second fails. least: the point with these differences
    alone. enough: whether that one fails; None where it couldn't be tried.
    """

    groups: tuple[tuple[AxisStep, ...], ...]
    good: Point
    bad: Point
    least: Point
    enough: bool | None

    @property
    def differences(self) -> list[AxisStep]:
        """Those of all groups, in the order of the axes."""
        return sorted((one for group in self.groups for one in group), key=lambda one: one.axis)


def find(end: Point, ask: Ask) -> SearchResult:
    """The differences on the way from GOOD, (0, …), to BAD, `end`, that make it fail.

    Of n steps one that is to blame is found in at most ceil(log2(n)) + 2 trials, where none is
    skipped; each further one that it needs takes at most ceil(log2(n)) + 1 more. Raises
    EndsAlikeError where BAD doesn't fail, or GOOD does; GOOD is tried only where no other point
    was good.
    """
    _require(end, Verdict.BAD, ask)
    start = needed = (0,) * len(end)
    groups, neighbours = list[tuple[AxisStep, ...]](), (start, end)
    while True:
        way = path(needed, end)
        good, bad = halve(way, ask)
        if way[good] == start:
            _require(start, Verdict.GOOD, ask)
        if not groups:
            neighbours = way[good], way[bad]
        group = differences(way[good], way[bad])
        if len(group) > 1:
            group = tuple(replace(one, good=needed[one.axis]) for one in group)
        groups.append(group)
        end, raised = way[bad], {one.axis for one in group}
        needed = tuple(end[at] if at in raised else here for at, here in enumerate(needed))
        verdict = Verdict.BAD if needed == end else ask(needed)
        if verdict is not Verdict.GOOD:
            enough = True if verdict is Verdict.BAD else None
            return SearchResult(tuple(groups), *neighbours, needed, enough)


def _require(point: Point, wanted: Verdict, ask: Ask) -> None:
    if (verdict := ask(point)) is not wanted:
        raise EndsAlikeError(point, verdict)


def path(start: Point, end: Point) -> list[Point]:
    """The points from `start` to `end`, one step at a time, along the first axis first."""
    points, here = [start], [*start]
    for axis, last in enumerate(end):
        while here[axis] < last:
            here[axis] += 1
            points.append(tuple(here))
    return points


def differences(good: Point, bad: Point) -> tuple[AxisStep, ...]:
    """The axes on which two points differ."""
    pairs = enumerate(zip(good, bad, strict=True))
    return tuple(AxisStep(axis, a, b) for axis, (a, b) in pairs if a != b)


def halve(points: Sequence[Point], ask: Ask) -> tuple[int, int]:
    """Indexes of a good point and of the next that fails; all between them were skipped.

    The first point is good and the last fails. A point that is skipped makes way for one far from
    it, as its neighbours are likely to be no better.
    """
    good, bad, skipped = 0, len(points) - 1, set[int]()
    while at := next((one for one in _middles(good, bad) if one not in skipped), None):
        verdict = ask(points[at])
        if verdict is Verdict.SKIPPED:
            skipped.add(at)
        elif verdict is Verdict.GOOD:
            good = at
        else:
            bad = at
    return good, bad


def _middles(first: int, last: int) -> Iterator[int]:
    """All numbers between two: the middle, then those of both halves, and so on."""
    ranges = [(first, last)]
    while ranges:
        middles = [(low, (low + high) // 2, high) for low, high in ranges if high - low > 1]
        yield from (middle for _, middle, _ in middles)
        ranges = [half for low, at, high in middles for half in ((low, at), (at, high))]
