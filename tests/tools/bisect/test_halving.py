"""The search for what makes a run fail: its bounds, skips and interacting differences."""

from __future__ import annotations

from itertools import product
from math import ceil, log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from launcher.tools.bisect.halving import (
    AxisStep,
    EndsAlikeError,
    Point,
    SearchResult,
    Verdict,
    differences,
    find,
    halve,
    path,
)

ENDS = st.lists(st.integers(1, 9), min_size=1, max_size=8).map(tuple)
"""BAD, by the number of steps on each axis."""


class Runs:
    """Fails where a point has gone as far as `needs` on each axis; counts what it was asked."""

    def __init__(self, needs: Point, skipped: frozenset[Point] = frozenset()) -> None:
        self.needs, self.skipped = needs, skipped
        self.asked: list[Point] = []

    def fails(self, point: Point) -> bool:
        return all(here >= least for here, least in zip(point, self.needs, strict=True))

    def __call__(self, point: Point) -> Verdict:
        assert point not in self.asked or point in self.skipped, "the same point was tried twice"
        self.asked.append(point)
        if point in self.skipped:
            return Verdict.SKIPPED
        return Verdict.BAD if self.fails(point) else Verdict.GOOD


@st.composite
def searches(draw: st.DrawFn, most: int = 8) -> tuple[Point, Point]:
    """BAD, and how far a point has to go on each axis to fail: on up to `most` of them at all."""
    end = draw(ENDS)
    axes = draw(st.sets(st.sampled_from(range(len(end))), min_size=1, max_size=most))
    needs = [draw(st.integers(1, last)) if at in axes else 0 for at, last in enumerate(end)]
    return end, tuple(needs)


@given(searches(most=1))
def test_one_cause_is_found_within_the_bound(search: tuple[Point, Point]) -> None:
    """The promise of the command: ceil(log2 n) + 2 trials, its check alone included."""
    end, needs = search
    runs = Runs(needs)
    found = find(end, runs)
    (axis,) = (at for at, least in enumerate(needs) if least)
    assert found.differences == [AxisStep(axis, needs[axis] - 1, needs[axis])]
    assert (found.least, found.enough) == (needs, True)
    assert not runs.fails(found.good)
    assert runs.fails(found.bad)
    assert len(runs.asked) <= ceil(log2(sum(end))) + 2


@given(searches())
def test_causes_that_need_each_other_are_all_found_and_none_beside_them(
    search: tuple[Point, Point],
) -> None:
    """Halving alone names the last of them, and misleads who mends it."""
    end, needs = search
    runs = Runs(needs)
    found = find(end, runs)
    wanted = [AxisStep(at, least - 1, least) for at, least in enumerate(needs) if least]
    assert found.differences == wanted
    assert (found.least, found.enough) == (needs, True)
    assert len(runs.asked) <= 1 + len(wanted) * (ceil(log2(sum(end))) + 1)


@st.composite
def broken(draw: st.DrawFn) -> tuple[Point, Point, frozenset[Point]]:
    """A search, and the points on its way that can't be tried."""
    end, needs = draw(searches())
    points = path((0,) * len(end), end)
    skipped = draw(st.frozensets(st.sampled_from(points))) - {points[0], points[-1]}
    return end, needs, skipped


APART = ((3, 1), (1, 1), frozenset({(3, 0)}))
"""The first axis needs its first step; (2, 0) is good and (3, 1) fails: its third was named."""


@given(broken())
@example(APART)
def test_what_cannot_be_tried_widens_the_answer_and_never_moves_it(
    search: tuple[Point, Point, frozenset[Point]],
) -> None:
    """A build that fails is no run that fails: taken for either, it led to the wrong commit."""
    end, needs, skipped = search
    points = path((0,) * len(end), end)
    runs = Runs(needs, skipped)
    found = find(end, runs)
    assert not runs.fails(found.good)
    assert runs.fails(found.bad)
    at, to = points.index(found.good), points.index(found.bad)
    assert {*points[at + 1 : to]} <= skipped
    assert _covers(found, needs) or found.enough is None
    assert found.enough is None or runs.fails(found.least)


def _covers(found: SearchResult, needs: Point) -> bool:
    """Whether each step that is needed lies in one of the differences found."""
    ranges = {one.axis: (one.good, one.bad) for one in found.differences}
    steps = ((at, least) for at, least in enumerate(needs) if least)
    return all(at in ranges and ranges[at][0] < least <= ranges[at][1] for at, least in steps)


@given(st.integers(2, 300), st.data())
def test_halving_passes_by_a_stretch_that_cannot_be_built(length: int, data: st.DataObject) -> None:
    """Going one by one through fifty broken commits takes an hour."""
    points = [(at,) for at in range(length)]
    first_bad = data.draw(st.integers(1, length - 1))
    start = data.draw(st.integers(1, length - 1))
    broken = frozenset(points[start : data.draw(st.integers(start, length - 1))])
    runs = Runs((first_bad,), broken)
    good, bad = halve(points, runs)
    assert good < first_bad <= bad
    assert {*points[good + 1 : bad]} <= broken
    away = not broken or not min(broken)[0] - 1 <= first_bad <= max(broken)[0] + 1
    if away:
        assert (good, bad) == (first_bad - 1, first_bad)
    halvings = ceil(log2(length)) + 1
    assert len(runs.asked) <= halvings * (halvings + 1) + (0 if away else len(broken))


@given(ENDS, st.data())
def test_any_answers_end_the_search_at_neighbours_of_which_one_fails(
    end: Point, data: st.DataObject
) -> None:
    """A flaky run answers as it likes; the report must still be of two trials that were seen."""
    seen: dict[Point, Verdict] = {end: Verdict.BAD, (0,) * len(end): Verdict.GOOD}

    def ask(point: Point) -> Verdict:
        return seen.setdefault(point, data.draw(st.sampled_from(Verdict)))

    found = find(end, ask)
    assert seen[found.good] is Verdict.GOOD
    assert seen[found.bad] is Verdict.BAD
    assert len({one.axis for one in found.differences}) == len(found.differences)
    if found.enough is not None:
        assert seen[found.least] is Verdict.BAD


@pytest.mark.parametrize("verdict", [Verdict.GOOD, Verdict.SKIPPED])
def test_a_bad_end_that_does_not_fail_is_said_after_one_trial(verdict: Verdict) -> None:
    with pytest.raises(EndsAlikeError) as raised:
        find((3, 1), lambda _: verdict)
    assert (raised.value.end, raised.value.verdict) == ((3, 1), verdict)


def test_a_path_goes_along_one_axis_after_the_other() -> None:
    """The order of the axes is a promise: base, packages, release, commits, keys."""
    assert path((0, 0), (2, 1)) == [(0, 0), (1, 0), (2, 0), (2, 1)]
    assert path((0, 1), (2, 1)) == [(0, 1), (1, 1), (2, 1)]
    for start, end in product([(0, 0), (1, 1)], [(3, 2), (1, 1)]):
        for one, other in zip(path(start, end), path(start, end)[1:], strict=False):
            (step,) = differences(one, other)
            assert step.bad == step.good + 1
