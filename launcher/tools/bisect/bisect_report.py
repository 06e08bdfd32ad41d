"""Says what a bisect found: in words, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from launcher.base.screen import duration
from launcher.tools.bisect.axes import COMMIT, Axis
from launcher.tools.bisect.bisect import BisectResult
from launcher.tools.bisect.halving import AxisStep, Point, Verdict

MOST_LISTED = 12


def text(found: Sequence[BisectResult]) -> str:
    """The report: what makes it fail, the last good and the first bad, what couldn't be tried."""
    return "\n".join(line for one in found for line in _lines(one))


def _lines(found: BisectResult) -> Iterator[str]:
    made, finding = found.made, found.finding
    axes, end = made.differences.axes, made.differences.end
    yield "what makes it fail:" if len(finding.differences) == 1 else "together they make it fail:"
    for one in finding.differences:
        yield f"  {_change(axes[one.axis], one)}"
        yield from (f"    {value}" for value in _shown(axes[one.axis], one))
    for name, point in (("last good", finding.good), ("first bad", finding.bad)):
        if point in made.outcomes:
            yield f"{name}: {made.differences.told(point)}: {made.outcomes[point].told}"
    yield f"  its log: {made.outcomes[finding.bad].log}"
    if sum(end) > sum(one.bad - one.good for one in finding.differences) and len(axes) > 1:
        enough = "GOOD fails with this alone" if finding.enough else "this alone couldn't be tried"
        yield f"  {enough}"
    skipped = [f"{one['is']}: {one['why']}" for one in _skips(found)]
    if untried := [*skipped, *found.untried]:
        yield "what couldn't be tried:"
        yield from (f"  {one}" for one in untried)
    took = duration(sum(one.seconds for one in made.outcomes.values()))
    steps = f"{sum(end)} difference{'s' if sum(end) > 1 else ''}"
    yield f"{len(made.outcomes)} trials of {steps}, {took}"


def _change(axis: Axis, one: AxisStep) -> str:
    """A difference in a line: what it is, and its values on both sides."""
    name = f" {axis.name}" if axis.name else ""
    return f"{axis.kind}{name}: {axis.told(one.good)} → {axis.told(one.bad)}"


def _shown(axis: Axis, one: AxisStep) -> list[str]:
    """The commits of a step, or the values between which nothing could be tried; not too many."""
    values = _between(axis, one)
    if axis.kind != COMMIT and len(values) == 1:
        return []
    more = len(values) - MOST_LISTED
    return values if more <= 0 else [*values[:MOST_LISTED], f"and {more} more"]


def _between(axis: Axis, one: AxisStep) -> list[str]:
    """What comes after the last good value, up to the first bad one: of commits with subjects."""
    values = axis.values[one.good + 1 : one.bad + 1]
    if axis.kind == COMMIT:
        return [value.described if value else "the image's own Megatron" for value in values]
    return [axis.told(at) for at in range(one.good + 1, one.bad + 1)]


def _skips(found: BisectResult) -> list[dict[str, str]]:
    """The points that couldn't be tried, or failed in another way."""
    made = found.made
    return [
        {"is": made.differences.told(point), "why": made.outcomes[point].told}
        for point, verdict in made.verdicts.items()
        if verdict is Verdict.SKIPPED
    ]


def as_json(found: Sequence[BisectResult]) -> dict[str, Any]:
    """The same for programs: of a release, its commits stand under `commits`."""
    first, *rest = map(_as_dict, found)
    return {**first, "commits": rest[0] if rest else None}


def _as_dict(found: BisectResult) -> dict[str, Any]:
    made, finding = found.made, found.finding
    causes = [(made.differences.axes[one.axis], one) for one in finding.differences]
    return {
        "causes": [
            {
                "kind": axis.kind,
                "name": axis.name,
                "last_good": axis.told(one.good),
                "first_bad": axis.told(one.bad),
                "between": _between(axis, one),
            }
            for axis, one in causes
        ],
        "enough": finding.enough,
        "last_good": _trial(found, finding.good),
        "first_bad": _trial(found, finding.bad),
        "skipped": _skips(found),
        "untried": [*found.untried],
        "differences": sum(made.differences.end),
        "trials": len(made.outcomes),
        "folder": made.name,
    }


def _trial(found: BisectResult, point: Point) -> dict[str, Any]:
    differences, outcome = found.made.differences, found.made.outcomes[point]
    values = {
        f"{axis.kind} {axis.name}".strip(): axis.told(at)
        for axis, at in zip(differences.axes, point, strict=True)
    }
    return {
        "is": differences.told(point),
        "values": values,
        "outcome": outcome.told,
        "log": outcome.log,
    }
