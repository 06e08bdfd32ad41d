"""Runs are compared in a picture, each as one curve however often it was started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from launcher import cli
from launcher.errors import UsageError
from launcher.records import metrics, plot, record
from launcher.records.metrics import Found, Memory, Step, Validation
from launcher.records.record import METRICS, Record
from launcher.records.throughput import Rates

PNG = b"\x89PNG\r\n\x1a\n"
ORANGE, BLUE = (0xFF, 0x7F, 0x0E), (0x1F, 0x77, 0xB4)
"""matplotlib's first two colours are BLUE and ORANGE."""


Keep = Callable[..., None]


@pytest.fixture
def keep(runs: Path) -> Keep:
    """Keeps a run's record, and metrics as (attempt, found) or (attempt, found, rates)."""

    def keep(run: str, name: str, *told: tuple[Any, ...]) -> None:
        created = f"2025-01-0{len(list(runs.glob('*'))) + 1}"
        kept = Record(run, name, created, "docker", "/", "a.yaml", {}, (), 1)
        (runs / run).mkdir(parents=True)
        (runs / run / record.FILE).write_text(json.dumps(asdict(kept)))
        lines = [json.dumps(metrics.as_record(f, a, *rates)) + "\n" for a, f, *rates in told]
        (runs / run / METRICS).write_text("".join(lines))

    return keep


def records(*told: tuple[int, Found]) -> list[dict[str, Any]]:
    return [metrics.as_record(found, attempt) for attempt, found in told]


def step(iteration: int, loss: float | None, ms: float = 100.0, batch: int = 8) -> Step:
    return Step(iteration, 100, ms, loss=loss, global_batch_size=batch)


def test_what_a_curve_is_made_of_where_two_attempts_overlap() -> None:
    found = plot.curves(
        "a",
        records(
            *((0, step(number, 10.0 - number)) for number in (1, 2, 3, 4, 5)),
            (0, Validation(4, loss=6.5)),
            (1, step(3, 7.1)),
            (1, step(4, 6.1)),
            (1, Validation(4, loss=6.6)),
        ),
    )
    assert found.train == [(1, 9.0), (2, 8.0), (3, 7.1), (4, 6.1)]
    assert found.validation == [(4, 6.6)]
    nan = float("nan")
    found = plot.curves(
        "a",
        records(
            *((0, Memory(0, 1, 5.0)), (0, step(1, None)), (0, step(2, nan)), (0, step(3, 2.0, 50))),
            (0, Validation(3, loss=2.1)),
            (0, Validation(3, dataset=1, loss=9.0)),
            (0, Validation(3, split="test", loss=9.0)),
        ),
    )
    assert (found.train, found.validation, found.tokens) == ([(3, 2.0)], [(3, 2.1)], [])
    assert found.samples == [(1, 80.0), (2, 80.0), (3, 160.0)]


def test_broken_lines_are_passed_over(keep: Keep, runs: Path) -> None:
    keep("0a1b2c3d", "a", (0, step(1, 3.0)))
    with (runs / "0a1b2c3d" / METRICS).open("a") as file:
        file.write('\n[]\n{"kind": "step", "atte')
    found = plot.curves("a", plot.read_metrics("0a1b2c3d"))
    assert (found.train, found.samples) == ([(1, 3.0)], [(1, 80.0)])


def has(picture: Path, colour: tuple[int, int, int]) -> bool:
    """Whether a pixel of it has that colour."""
    pixels = (imread(picture)[:, :, :3] * 255).round()
    return bool((pixels == colour).all(axis=2).any())


@pytest.mark.parametrize("rates", [(), (Rates(1000.0, 1.0),)])
def test_two_runs_in_one_picture(
    keep: Keep, tmp_path: Path, capsys: pytest.CaptureFixture[str], rates: tuple[Rates, ...]
) -> None:
    keep("0a1b2c3d", "a", *((0, step(i, 3.0 - i / 10), *rates) for i in range(1, 9)))
    keep("1a1b2c3d", "b", *((0, step(i, 4.0 - i / 10)) for i in range(1, 9)))
    assert cli.main(["plot", "a", "1a1b", "a", "-o", "both.png"]) == 0
    assert capsys.readouterr().out == "both.png\n"
    picture = tmp_path / "both.png"
    assert picture.read_bytes().startswith(PNG)
    assert has(picture, BLUE)
    assert has(picture, ORANGE)
    assert cli.main(["plot", "a"]) == 0
    assert has(tmp_path / "plot.png", BLUE)
    assert not has(tmp_path / "plot.png", ORANGE)


def test_what_cannot_be_drawn_is_told(
    keep: Keep, runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keep("0a1b2c3d", "a", (0, step(1, 3.0)))
    keep("1a1b2c3d", "b")
    (runs / "1a1b2c3d" / METRICS).unlink()
    assert cli.main(["plot", "b"]) == 2
    assert "launcher: no metrics of b (1a1b2c3d)\n" in capsys.readouterr().err
    assert cli.main(["plot", "a", "b"]) == 0
    assert "b (1a1b2c3d) has no metrics yet" in capsys.readouterr().err
    assert cli.main(["plot", "c"]) == 2
    assert "no run 'c'" in capsys.readouterr().err
    assert cli.main(["plot", "a", "-o", "nowhere/a.png"]) == 2
    assert "nowhere/a.png can't be written: No such file" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match="plot needs matplotlib, which") as error:
        plot.plot(["a"], Path("a.png"))
    assert error.value.remedy.endswith("-m pip install matplotlib")
