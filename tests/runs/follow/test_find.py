"""Runs are found on every backend that answers; one that doesn't is told where it matters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.base.errors import AbsentError, EngineError, LauncherError, UsageError
from launcher.runs.follow import find
from launcher.runs.plan.job import ConnectionLost, ExitStatus, goes_on
from launcher.runs.records import record
from tests.runs.conftest import FakeJob


def made_up(run: str, name: str, created: str, **more: Any) -> FakeJob:
    """A run with these labels."""
    labels = {"name": name, "created": created, **more.pop("more", {})}
    labels = {f"megatron-launchpad.{key}": value for key, value in labels.items()}
    return FakeJob(run=run, labels=labels, **more)


@dataclass
class MadeUp:
    """Stands in for a backend; with an error it doesn't answer."""

    known: list[FakeJob] = field(default_factory=list)
    error: Exception | None = None

    def jobs(self) -> list[FakeJob]:
        if self.error:
            raise self.error
        return self.known


FIRST = made_up("aa11", "first", "2025-01-01")
SECOND = made_up("bb22", "second", "2025-01-02")
THIRD = made_up("cc33", "third", "2025-01-03")


@pytest.fixture
def backends(runs: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two backends, in place of the real ones, and the records of their runs."""
    for one in (FIRST, SECOND, THIRD):
        (runs / one.run).mkdir(parents=True)
    found: dict[str, Any] = {"docker": MadeUp([FIRST, THIRD]), "local": MadeUp([SECOND])}
    monkeypatch.setattr(find, "names", lambda: [*found])
    monkeypatch.setattr(find, "backend", found.__getitem__)
    return found


@pytest.mark.parametrize("error", [EngineError("no engine", "Start one."), ConnectionLost("gone")])
def test_a_backend_that_does_not_answer_has_none(
    backends: dict[str, Any], error: Exception
) -> None:
    newest_first = [
        (backends["docker"], THIRD),
        (backends["local"], SECOND),
        (backends["docker"], FIRST),
    ]
    assert find.jobs() == newest_first
    assert find.job("third") == newest_first[0]
    with pytest.raises(UsageError, match="no run 'fourth'"):  # where all answer
        find.job("fourth")
    backends["docker"].error = error
    assert find.jobs() == [(backends["local"], SECOND)]
    assert find.job("second") == (backends["local"], SECOND)
    with pytest.raises(EngineError) as caught:
        find.job("third")
    assert caught.value.problem == f"no run 'third'; these gave no answer: docker: {error.args[0]}"
    assert [*map(str, find.everywhere()[1])] == [f"docker: {error.args[0]}"]
    backends["local"].error = error
    found, silent = find.everywhere()
    assert (found, [*map(str, silent)]) == ([], [f"docker, local: {error.args[0]}"])


@pytest.mark.parametrize(
    ("kept_by", "error", "raised"),
    [
        ("local", EngineError("no engine", "Start one."), UsageError),
        ("docker", AbsentError("no engine", "Start one."), EngineError),
        (None, AbsentError("no engine", "Start one."), UsageError),
        (None, EngineError("no engine", "Start one."), EngineError),
    ],
)
def test_only_an_engine_that_may_have_the_run_is_waited_for(
    backends: dict[str, Any], kept_by: str | None, error: Exception, raised: type[Exception]
) -> None:
    """On a machine without an engine an ended local run was said to be on one."""
    backends["docker"].error = error
    if kept_by:
        record.write(record.Record("dd44", "fourth", "2025", kept_by, "/", "a.yaml", {}, (), 1))
    with pytest.raises(LauncherError) as caught:
        find.job("fourth")
    assert type(caught.value) is raised


def test_a_name_is_that_of_an_own_run_and_another_users_has_its_id(
    backends: dict[str, Any],
) -> None:
    theirs = made_up("dd44", "first", "2025-01-04")
    backends["docker"].known += [theirs, made_up("ee55", "fifth", "2025-01-05")]
    assert find.job("first") == (backends["docker"], FIRST)
    assert find.job("dd") == (backends["docker"], theirs)
    with pytest.raises(UsageError, match="run ee55, called fifth, was started by somebody else"):
        find.job("fifth")


def test_what_can_be_resumed_has_ended_and_left_a_complete_checkpoint(
    backends: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(run: str, save: str | None) -> None:
        config = {"name": "a", "image": "cpu", "checkpoint": {"save": save}}
        record.write(record.Record(run, "a", run, "docker", str(tmp_path), "a.yaml", config, (), 1))

    def newest(root: Path, line: str) -> bool:
        if root.name == "locked":
            raise PermissionError(13, "Permission denied")
        return (root / "whole").is_dir()

    monkeypatch.setattr(find.folders, "newest_complete", newest)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "saved/whole").mkdir(parents=True)
    (tmp_path / "half").mkdir()
    saves = {"10": "saved", "11": "half", "12": None, "13": "locked", "14": "gone", "15": "~/saved"}
    for run, save in saves.items():
        kept(run, save)
    kept("bb22", "saved")
    assert find.job("bb22") == (backends["local"], SECOND)  # goes on
    assert find.resumable() == ["15", "10"]


@pytest.mark.parametrize(
    ("how", "state"),
    [
        ({}, "running"),
        ({"doing": "paused"}, "paused"),
        ({"end": ExitStatus(3), "over": True}, "ended (3)"),
        ({"end": ConnectionLost("gone")}, "unknown"),
    ],
)
def test_a_row(
    how: dict[str, Any], state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"gpus": "2", "image": "some/image", "checkpoints": str(tmp_path)}
    job: Any = made_up("aa11", "first", "2025", more=more, **how)
    told = ("aa11", "first", state, "fake", "2", "some/image", "2025", "")
    assert find.row(job) == told
    assert goes_on(job) is ("end" not in how)

    def refuse(root: Path, line: str = "") -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(find.folders, "newest_complete", refuse)
    assert find.row(job) == (*told[:-1], "unknown")  # whose checkpoints this user may not see


def test_an_unknown_name_lists_ones_own_runs_and_the_nearest(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other people's containers were listed, and hid that one's own run had ended."""
    theirs = [made_up(f"{n:08x}", f"theirs-{n}", "2025-01-01") for n in range(20)]
    monkeypatch.setattr(find, "backend", lambda name: MadeUp(theirs))
    kept = [SimpleNamespace(run="ffff0000", name="gpt2-mine")]
    monkeypatch.setattr(record, "records", lambda: kept)
    with pytest.raises(UsageError) as caught:
        find.job("gpt2-mien")
    assert caught.value.remedy == "Did you mean 'gpt2-mine'? Known: ffff0000 (gpt2-mine)"
    monkeypatch.setattr(record, "find", lambda text: kept[0])
    with pytest.raises(UsageError) as caught:
        find.job("gpt2-mine")
    assert caught.value.remedy.endswith("To go on with it: launcher resume ffff0000")
