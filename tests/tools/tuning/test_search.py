"""The search, with costs that are known: it finds the fastest in few measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.tools.tuning.candidates import MICRO, WORKERS, Setting
from launcher.tools.tuning.search import Measurement, Search, as_line, of_lines
from tests.tools.tuning.test_candidates import space

FAST = "megatron_args.no_fast"
Predict = Callable[[Setting], "float | None"]


def micro_of(setting: Setting) -> int:
    """Its micro-batch; 1 is given."""
    found = dict(setting.changes).get(MICRO, 1)
    assert isinstance(found, int)
    return found


def cost(setting: Setting) -> float:
    """A host that takes 5 ms a micro-batch, and 100 for whoever does without the fast path."""
    return 10 + 5 * 16 / micro_of(setting) + 100 * bool(dict(setting.changes).get(FAST))


class Ran:
    """Measures by `cost`; what is too large is out of memory."""

    def __init__(self, largest: int = 64, most: int = 100) -> None:
        self.largest, self.most = largest, most
        self.asked: list[Setting] = []

    def __call__(self, setting: Setting) -> Measurement | None:
        if len(self.asked) >= self.most:
            return None
        self.asked.append(setting)
        if micro_of(setting) > self.largest:
            return Measurement(setting, why="GPU memory is out")
        return Measurement(setting, cost(setting), 1000.0)


def search(ran: Ran) -> Search:
    return Search(space("training.micro_batch_size=1"), cost, ran)


def test_the_best_predicted_comes_after_what_is_given() -> None:
    ran = Ran()
    best = search(ran).run()
    assert ran.asked[0] == Setting()
    assert best
    assert dict(best.setting.changes) == {MICRO: 16}
    assert len(ran.asked) < 8


def test_what_is_predicted_hopeless_is_not_measured() -> None:
    ran = Ran()
    search(ran).run()
    assert not any(FAST in dict(setting.changes) for setting in ran.asked)


@pytest.mark.parametrize(("largest", "predict"), [(4, cost), (16, lambda setting: None)])
def test_the_largest_that_fits_is_found(largest: int, predict: Predict) -> None:
    """Out of memory is survived; without a prediction the neighbours are tried."""
    best = Search(space("training.micro_batch_size=1"), predict, Ran(largest)).run()
    assert best
    assert dict(best.setting.changes) == {MICRO: largest}


def test_the_time_ends_it_with_what_is_known() -> None:
    best = search(ran := Ran(most=1)).run()
    assert best
    assert (best.setting, len(ran.asked)) == (Setting(), 1)


def test_what_takes_less_is_tried_where_no_time_is_left_for_more() -> None:
    """The search ended with the first setting that would have compiled for too long."""
    ran, given = Ran(), space("training.micro_batch_size=8", "training.global_batch_size=8")

    def quick(setting: Setting) -> Measurement | None:
        return None if MICRO in dict(setting.changes) else ran(setting)

    found = Search(given, lambda _: 1.0, quick)
    best = found.run()
    assert best
    assert best.setting in found.tried
    assert {WORKERS} in [set(dict(setting.changes)) for setting in ran.asked]
    assert [str(setting) for setting in found.left] == ["micro_batch_size 4"]


@pytest.mark.parametrize(
    ("why", "tried"),
    [("a compiled extension is missing: line {}", 2), ("GPU memory is out", 4)],
)
def test_what_ends_two_settings_alike_ends_the_search(why: str, tried: int) -> None:
    """An extension for another Python was found missing by each of the settings, minutes long."""
    asked = list[Setting]()

    def ran(setting: Setting) -> Measurement:
        asked.append(setting)
        return Measurement(setting, why=why.format(len(asked)), cure="compile it")

    assert Search(space("training.micro_batch_size=1"), cost, ran).run() is None
    assert len(asked) == tried


def test_what_is_kept_is_what_was_measured() -> None:
    ran = Measurement(Setting(((MICRO, 8), (FAST, None))), 12.5, 3000.0)
    found = [ran, Measurement(Setting(), why="?", cure="!")]
    lines = [json.loads(json.dumps(as_line(one))) for one in found]
    assert [*of_lines(iter([{"changes": 3}, *lines]))] == [
        replace(one, setting=Setting(tuple(sorted(one.setting.changes)))) for one in found
    ]
