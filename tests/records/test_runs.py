"""The runs that there were: listed, filtered, pruned."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.cli import main
from launcher.errors import UsageError
from launcher.plan.job import Ended, Lost
from launcher.records import ending, owner, record, runs
from launcher.records.ending import Ending
from launcher.records.record import Record

NOW = datetime(2026, 1, 31, tzinfo=timezone.utc)
IDS = ("aa000000", "bb000000", "cc000000", "dd000000")


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs, the first the newest: running, finished, failed, and one nobody followed."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    for age, run in enumerate(IDS):
        created = (NOW - timedelta(days=10 * age)).isoformat()
        name = "gpt2" if age % 2 else "demo"
        record.write(Record(run, name, created, "docker", "/", "a.yaml", {}, (), 1))
    ending.keep(IDS[1], 0, Ending(Ended(0), False, ""), [], None)
    ending.keep(IDS[2], 0, Ending(Ended(0), False, ""), [], None)
    ending.keep(IDS[2], 1, Ending(Ended(7), False, ""), [], None)
    metrics = [{"kind": "step", "iteration": n, "loss": n / 2} for n in range(1, 4)]
    lines = "".join(json.dumps(one) + "\n" for one in [*metrics, {"kind": "validation"}])
    (tmp_path / IDS[1] / record.METRICS).write_text(lines + '{"kind": "st')
    return tmp_path


def job(run: str, ended: Ended | None = None, state: str = "running") -> Any:
    return SimpleNamespace(run=run, ended=lambda: ended, state=lambda: state)


def lost(run: str) -> Any:
    def ended() -> None:
        raise Lost("gone")

    return SimpleNamespace(run=run, ended=ended)


def known() -> list[runs.Run]:
    return runs.known([job(IDS[0]), job(IDS[3], Ended(0)), lost(IDS[3])])


def test_each_run_has_its_state_its_code_and_its_last_step(kept: Path) -> None:
    for name in (record.ENDINGS, record.METRICS):
        (kept / IDS[3] / name).write_text("5\n")  # a broken record hides no other
    found = [(run.run, run.state, run.code) for run in known()]
    assert found == [
        (IDS[0], "running", None),
        (IDS[1], "finished", 0),
        (IDS[2], "failed", 7),
        (IDS[3], "unknown", None),
    ]
    assert (known()[1].iteration, known()[1].loss) == (3, 1.5)
    assert known()[0].iteration is None


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (runs.Filter(), "abcd"),
        (runs.Filter(states=("failed", "unknown")), "cd"),
        (runs.Filter(name="demo"), "ac"),
        (runs.Filter(since=NOW - timedelta(days=15)), "ab"),
        (runs.Filter(before=NOW - timedelta(days=15)), "cd"),
        (runs.Filter(name="demo", before=NOW - timedelta(days=15)), "c"),
    ],
)
def test_filters(wanted: runs.Filter, found: str) -> None:
    assert "".join(run.run[0] for run in known() if wanted.takes(run)) == found


def test_what_is_pruned_has_ended_and_is_none_of_the_newest(kept: Path) -> None:
    assert [run.run for run in runs.to_prune(known(), runs.Filter(), 0)] == [*IDS[1:3]]
    assert [run.run for run in runs.to_prune(known(), runs.Filter(), 2)] == [IDS[2]]
    assert runs.to_prune(known(), runs.Filter(states=("running",)), 0) == []
    assert runs.to_prune(known(), runs.Filter(states=("failed",)), 1) == []
    assert [run.run for run in runs.to_prune(known(), runs.Filter(name="demo"), 1)] == [IDS[2]]
    (paused, *_) = runs.known([job(IDS[0], state="paused")])
    assert paused.state == "paused"
    assert paused not in runs.to_prune([paused], runs.Filter(), 0)
    unknown = runs.Filter(states=("unknown",))  # it may go on
    assert [run.run for run in runs.to_prune(known(), unknown, 0)] == [IDS[3]]
    (kept / IDS[2] / "log.2").touch()  # begun, and not ended as far as is known here
    assert known()[2].state == "unknown"
    assert [run.run for run in runs.to_prune(known(), runs.Filter(), 0)] == [IDS[1]]


def test_ages() -> None:
    hours = {"30m": 0.5, "12h": 12, "7d": 168, "2w": 336}
    assert {age: (NOW - runs.ago(age, NOW)).total_seconds() / 3600 for age in hours} == hours
    for age in ("", "7", "d", "-1d", "7y", "999999d"):
        with pytest.raises(UsageError):
            runs.ago(age, NOW)


@pytest.fixture
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.follow.find.everywhere", lambda: ([], []))


@pytest.mark.usefixtures("_no_engine")
def test_the_command_lists_shows_and_prunes(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "--state", "failed"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].split()[:4] == ["RUN", "NAME", "STATE", "CODE"]
    assert [line.split()[:4] for line in listed[1:]] == [[IDS[2], "demo", "failed", "7"]]
    assert main(["runs", "--json", "--name", "gpt2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)["run"] for line in lines] == [IDS[1], IDS[3]]
    assert main(["runs", "show", "cc"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [ending["code"] for ending in shown["endings"]] == [0, 7]
    assert main(["runs", "prune", "--state", "failed", "--dry-run"]) == 0
    assert (kept / IDS[2]).exists()
    capsys.readouterr()
    with owner.following(IDS[2]):
        assert main(["runs", "prune", "--state", "failed"]) == 0
        assert capsys.readouterr().out == "freed 0.0 MB\n"
    assert main(["runs", "prune", "--state", "failed"]) == 0
    assert not (kept / IDS[2]).exists()
    assert (kept / IDS[1]).exists()


@pytest.mark.usefixtures("_no_engine")
def test_a_prune_that_does_not_say_which_and_an_unknown_state_are_refused(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "prune"]) == 2
    assert main(["runs", "prune", "--keep", "-1"]) == 2
    assert main(["runs", "--state", "fialed"]) == 2
    assert "failed" in capsys.readouterr().err
    assert len([*kept.glob(f"*/{record.FILE}")]) == len(IDS)


def test_a_log_that_is_kept_is_read_though_no_engine_answers(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def silent() -> Any:
        return [], ["docker: no container engine answers"]

    monkeypatch.setattr("launcher.follow.find.everywhere", silent)
    assert main(["logs", IDS[1]]) == 125
    assert "no container engine answers" in capfd.readouterr().err
    (kept / IDS[1] / record.LOG).write_text("as it was\n")
    assert main(["logs", IDS[1]]) == 0
    told = capfd.readouterr()
    assert told.out == "as it was\n"
    assert "an engine doesn't answer" in told.err
    assert main(["logs", "nothing"]) == 125
