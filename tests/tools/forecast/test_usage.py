"""Where a run's seconds went, by records of which each second is known."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from launcher.tools.forecast import receipt, site, usage
from launcher.tools.forecast.forecast import Hardware, forecast
from launcher.tools.forecast.usage import RunFact
from tests.tools.forecast.records import H100, MadeUpRun


def fact(folder: Path, made: MadeUpRun) -> RunFact:
    found = usage.of_run(made.keep(folder))
    assert found
    return found


@pytest.mark.parametrize("zone", [0, -8, 5.5])
def test_each_second_is_where_it_went(folder: Path, zone: float) -> None:
    """A container's clock may be of another zone: its start took hours, or none."""
    found = fact(folder, MadeUpRun(zone=zone).attempt(0, 0, 1000))
    spent = {name: value for name, value in found.seconds.items() if value}
    assert spent == pytest.approx(
        {"start": 20, "first steps": 12, "steps": 1000, "saves": 120, "evaluations": 15, "end": 40},
        abs=1.5,
    )
    assert (found.ms, found.saves, found.evaluations) == (1000, 4, 3)
    assert (found.iterations, found.tokens, found.place) == (1000, 1000 * 16 * 512, H100)
    assert found.total == pytest.approx(1207, abs=2)


def test_a_save_and_an_evaluation_in_one_line_are_told_apart(folder: Path) -> None:
    """Half of an evaluation's time went to the save beside it."""
    made = MadeUpRun(options={"save_interval": 250, "eval_interval": 125, "log_interval": 25})
    found = fact(folder, made.attempt(0, 0, 1000))
    assert found.seconds["saves"] == pytest.approx(3 * 30, abs=1)
    assert found.seconds["evaluations"] == pytest.approx(7 * 5, abs=1)


def test_a_restart_costs_what_is_done_again_and_the_wait(folder: Path) -> None:
    made = MadeUpRun().attempt(0, 0, 300, outcome="failed")
    made.now += timedelta(seconds=60)
    found = fact(folder, made.attempt(1, 200, 1000))
    assert found.iterations == 1000
    assert found.seconds["done again"] == pytest.approx(100 + 30 + 5, abs=1)
    assert found.seconds["restarts"] == pytest.approx(60, abs=2)
    assert found.seconds["first steps"] == pytest.approx(24, abs=1)
    assert found.attempts == 2


def test_a_run_that_the_watchdog_ended_hung(folder: Path) -> None:
    made = MadeUpRun(end=1800).attempt(0, 0, 300, outcome="failed", by="the watchdog")
    assert fact(folder, made).seconds["hangs"] == pytest.approx(1800, abs=2)


def test_waiting_for_data_counts_where_nothing_hides_it(folder: Path) -> None:
    """The GPU works through a graph meanwhile: then only what a line took more was lost."""
    made = MadeUpRun(data_ms=300).attempt(0, 0, 350)
    made.lines[-1] |= {"ms_per_step": 1500.0, "data_ms": 800.0}
    found = fact(folder, made)
    assert found.knows_data
    assert found.seconds["data"] == pytest.approx(25, abs=1)
    eager = MadeUpRun("aaaa0002", {"no_fast": True}, data_ms=300).attempt(0, 0, 1000)
    found = fact(folder, eager)
    assert found.seconds["data"] == pytest.approx(300, abs=1)
    assert found.seconds["steps"] == pytest.approx(700, abs=1)
    assert found.seconds["saves"] == pytest.approx(120, abs=1)


def test_a_foreign_record_has_no_fact(folder: Path) -> None:
    """One that another version wrote ended the forecast of every run."""
    run = MadeUpRun().attempt(0, 0, 1000).keep(folder)
    (folder / run / "plan.json").write_text('{"program": "gpt", "options": {}}')
    assert usage.of_run(run) is None
    (folder / run / "plan.json").write_text("[]")
    assert usage.of_run(run) is None


FOREIGN = [
    ("plan.json", '"program": "gpt"', '"program": null'),
    ("plan.json", '"nodes": 1', '"nodes": "x"'),
    ("plan.json", '"train_iters": 1000', '"train_iters": 1e999'),
    ("facts.json", f'"name": "{H100}"', '"name": 5'),
    ("facts.json", '"total"', '"size"'),
]


@pytest.mark.parametrize(("file", "ours", "foreign"), FOREIGN)
def test_a_foreign_word_ends_no_forecast_and_no_receipt(
    folder: Path, file: str, ours: str, foreign: str
) -> None:
    """One odd record ended `run --dry-run` of each run on this machine."""
    run = MadeUpRun().attempt(0, 0, 1000).keep(folder)
    fact = usage.of_run(run)
    assert fact
    path = folder / run / file
    text = path.read_text()
    assert ours in text
    path.write_text(text.replace(ours, foreign))
    card = Hardware(H100, H100, 85 * 10**9, (9, 0))
    wider = replace(fact.work, options=fact.work.options | {"hidden_size": 1536})
    assert forecast(wider, card, site.earlier(H100)).step
    if found := receipt.of_run(run):
        assert [*receipt.lines(found)]


def test_the_median_is_of_iterations_however_many_a_line_has() -> None:
    """Its list had one number for each iteration, and a line counted as 1000 of them at most."""
    short = [usage._Line(at, at + 1, 1.0, None) for at in range(1500)]
    assert usage._median([usage._Line(0, 10**9, 5.0, None), *short]) == 5.0
    assert usage._median(short) == 1.0


def test_of_a_long_run_the_newest_lines_tell_its_step(folder: Path) -> None:
    """Reading all of a long run's metrics took seconds, so that it had no part in a forecast."""
    run = MadeUpRun(start=500).attempt(0, 0, 1000).keep(folder)
    found = usage.of_run(run, 1500)
    assert found
    assert (found.ms, found.whole) == (1000, False)
    assert 0 < found.iterations < 500
