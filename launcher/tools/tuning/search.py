"""Searches for the fastest setting with few measurements, the best predicted first."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from launcher.tools.tuning.candidates import Setting, SettingChanges, Space, combinations

TOGETHER = ("micro-batch", "precision", "layout", "recomputing")
"""Axes that bear on each other, and on whether the model fits: predicted together."""

FASTER = 0.99
"""A setting is taken where it takes less than this share of the best one's time."""

HOPELESS = 1.5
"""One that is predicted to take so much more than the best isn't measured."""

TOLD = ("ms", "mib", "why", "cure")
"""What is kept of a measurement, as `Measurement` has it."""

FIRST_TRIES = 3
"""Of the settings predicted best, until one of them works."""


@dataclass(frozen=True)
class Measurement:
    """What a setting took: ms a step and MiB on a GPU; `why` it took nothing, and its cure."""

    setting: Setting
    ms: float | None = None
    mib: float | None = None
    why: str = ""
    cure: str = ""


MeasureSetting = Callable[[Setting], Measurement | None]
"""Measures a setting, or knows what it took; None where there is no more time for it."""

Predicted = Callable[[Setting], float | None]
"""ms that a setting should take; None where that isn't known."""


class SearchOver(Exception):
    """Raised to end the search: more settings would show nothing new."""


class Search:
    """A search in a space of settings; `tried` has all that were measured, in their order, `left`
    those for which there was no time: another one, for which nothing is compiled, may take less."""

    def __init__(
        self, space: Space, predicted: Predicted, measure: MeasureSetting, names: Sequence[str] = ()
    ) -> None:
        """`names` are those of the axes to search, all where none is given."""
        self.space, self.predicted, self.measure = space, predicted, measure
        axes = space.axes().items()
        self.axes = {name: values for name, values in axes if name in names or not names}
        self.tried: dict[Setting, Measurement] = {}
        self.left: list[Setting] = []
        self.best: Measurement | None = None
        self.alike = False  # what ended all that was tried

    def run(self) -> Measurement | None:
        """Search until nothing is faster, or the time is over; the fastest, None if none ran.

        What ends two settings for the same reason, other than memory, ends the others too.
        """
        try:
            self._take(Setting())
            self._first()
            while self.best and self._improved():
                pass
        except SearchOver:
            pass
        return self.best

    def _take(self, setting: Setting) -> bool:
        """Measure a setting that wasn't yet; whether it is the best so far. Raises `SearchOver`."""
        if setting in self.tried or setting in self.left:
            return False
        found = self.measure(setting)
        if found is None:
            self.left.append(setting)
            return False
        self.tried[setting] = found
        least = self.best.ms * FASTER if self.best and self.best.ms else float("inf")
        better = found.ms is not None and found.ms < least
        self.best = found if better else self.best
        self.alike = not self.best and len(self.tried) > 1 and self._end_alike()
        if self.alike:
            raise SearchOver
        return better

    def _end_alike(self) -> bool:
        """Whether all were ended by one thing, in words that differ in numbers alone."""
        whys = {re.sub(r"\d", "", found.why) for found in self.tried.values()}
        return len(whys) == 1 and "memory" not in whys.pop()

    def _first(self) -> None:
        """The best predicted of what bears on each other."""
        known = [self.axes[name] for name in TOGETHER if name in self.axes]
        found = combinations(self.space, Setting(), known)
        for setting in sorted(found, key=self._rank)[:FIRST_TRIES]:
            if self.predicted(setting) is None:
                return
            self._take(setting)
            ran = self.tried.get(setting)
            if ran is None or ran.ms is not None:
                return

    def _rank(self, setting: Setting) -> tuple[float, int]:
        return self.predicted(setting) or 0.0, len(setting.changes)

    def _improved(self) -> bool:
        """Go along each axis from the best; whether one of them was faster."""
        return any([self._along(name, values) for name, values in self.axes.items()])

    def _along(self, name: str, values: list[SettingChanges]) -> bool:
        """Try what the axis has beside the best, the next micro-batches alone; whether one won."""
        assert self.best
        here = self.best.setting
        others = [self.space.changed(here, changes) for changes in values]
        others = [one for one in dict.fromkeys(others) if not self.space.why_not(one)]
        if name == "micro-batch" and here in others:
            at = others.index(here)
            others = others[max(0, at - 1) : at + 2]
        won = False
        for one in sorted(others, key=self._rank):
            if self._may_win(one):
                won |= self._take(one)
        return won

    def _may_win(self, setting: Setting) -> bool:
        assert self.best
        now, then = self.predicted(self.best.setting), self.predicted(setting)
        return not (now and then) or then < now * HOPELESS


def as_line(found: Measurement) -> dict[str, object]:
    """A measurement as JSON."""
    changes = dict(found.setting.changes)
    return {"changes": changes} | {name: getattr(found, name) for name in TOLD}


def of_lines(lines: Iterator[Mapping[str, object]]) -> Iterator[Measurement]:
    """The measurements that lines of JSON hold; what is no such line is passed over."""
    for line in lines:
        changes = line.get("changes")
        if isinstance(changes, dict):
            values = {name: line[name] for name in TOLD if name in line}
            yield Measurement(Setting(tuple(sorted(changes.items()))), **values)  # type: ignore[arg-type]
