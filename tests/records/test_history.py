"""How a run's attempts ended, and who ended them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.plan.job import Cause, Ended
from launcher.records import history
from launcher.records.ending import Ending
from launcher.train.checkpoints.folders import Checkpoint

RUN = "0a1b2c3d"
ASKED = "runner: SIGTERM: asked 2 ranks to stop, waiting 600 s\n"


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    (tmp_path / RUN).mkdir()
    return tmp_path / RUN


@pytest.mark.parametrize(
    ("ending", "signals", "by"),
    [
        (Ending(Ended(0), False, ""), [], "itself"),
        (Ending(Ended(3), False, ""), [], "itself"),
        (Ending(Ended(0), True, ""), ["SIGINT"], "the launcher, on SIGINT"),
        (Ending(Ended(137), True, ""), ["SIGINT", "SIGTERM"], "the launcher, on SIGINT, SIGTERM"),
        (Ending(Ended(0), True, ""), [], "launcher stop"),
        (Ending(Ended(0), False, ASKED), [], "somebody outside"),
        (Ending(Ended(137, Cause.REMOVED), False, ""), [], "removed from outside"),
        (Ending(Ended(137, Cause.MEMORY), False, ""), ["SIGINT"], "out of memory"),
    ],
)
def test_who_ended_it(ending: Ending, signals: list[str], by: str) -> None:
    assert history.by(ending, signals) == by


def test_endings_come_back_in_their_order_with_what_was_saved(runs: Path) -> None:
    saved = Checkpoint(20, Path("/ck/iter_0000020"))
    history.add(RUN, 0, Ending(Ended(1), False, "runner: rank 1 exited with code 1\n"), [], saved)
    history.add(RUN, 1, Ending(Ended(0), False, ""), [], None)
    with (runs / history.ENDINGS).open("a") as file:
        file.write('{"attempt": 2, "out')
    first, second = history.endings(RUN)
    assert (first["outcome"], first["code"], first["iteration"]) == ("failed", 1, 20)
    assert first["reason"] == "rank 1 exited with code 1"
    assert (second["attempt"], second["outcome"], second["checkpoint"]) == (1, "finished", None)


def test_a_run_without_a_record_has_none() -> None:
    history.add("ffffffff", 0, Ending(Ended(0), False, ""), [], None)
    assert history.endings("ffffffff") == []
