"""A run's attempts and what goes on with it, beside other launchers that use the same folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.errors import EngineError, UsageError
from launcher.follow import start
from launcher.follow.assemble import Assembled, assemble
from launcher.names import LABEL
from launcher.plan.config import RunConfig
from launcher.plan.image import Facts
from launcher.plan.plan import Plan, Stamp
from launcher.plan.source import Asked, Origin
from launcher.records import owner, provenance, record
from launcher.train.checkpoints import folders, lineage
from launcher.train.checkpoints.folders import Checkpoint
from tests.follow.test_assemble import NO_GPUS
from tests.train.test_folders import distributed

RUN = "0a1b2c3d"


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an interrupted save in it."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    (tmp_path / "save").mkdir()
    lineage.claim(tmp_path / "save", RUN, RUN)
    (tmp_path / "save/iter_0000010.partial").mkdir()
    return tmp_path / "save"


def checkpoints(save: Path) -> list[str]:
    return [path.name for path in save.glob("iter_*")]


def asked(save: Path, **sections: Any) -> Asked:
    values = {"name": "a", "image": "cpu", "gpus": 0, "checkpoint": {"save": str(save)}}
    config = RunConfig.model_validate({**values, **sections})
    return Asked(config, Origin("run.yaml", {}, {}), str(save))


def job(run: str, save: Path) -> Any:
    """A run that goes on and saves there."""
    return SimpleNamespace(run=run, labels={f"{LABEL}checkpoints": str(save)}, ended=lambda: None)


@pytest.fixture
def again(
    save: Path, plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Plan]]:
    """Makes the second attempt while other jobs go on; the plans that were started."""

    def again(wanted: Asked, *jobs: Any, seen: bool = True) -> list[Plan]:
        made = replace(plan("gpt2-tiny.yaml"), run=RUN, checkpoints=str(save))
        labels = {**dict(made.labels), f"{LABEL}run": RUN, f"{LABEL}checkpoints": str(save)}
        made = replace(made, labels=tuple(labels.items()))
        monkeypatch.setattr(start, "assemble", lambda *_: Assembled(made, Facts()))
        monkeypatch.setattr(start.find, "jobs", lambda: [(None, one) for one in jobs])
        started: list[Plan] = []
        chosen: Any = SimpleNamespace(
            start=lambda plan, attach: started.append(plan), shares_files=seen
        )
        start.Attempts(wanted, chosen, Stamp(RUN, ""), None)(1)
        return started

    return again


def test_another_run_that_took_the_folder_in_the_pause_is_left_alone(
    save: Path, again: Callable[..., list[Plan]]
) -> None:
    with pytest.raises(UsageError, match="is being saved to by run ffffffff"):
        again(asked(save), job("ffffffff", save))
    assert checkpoints(save) == ["iter_0000010.partial"]
    assert len(again(asked(save), job(RUN, save), job("ffffffff", save / "other"))) == 1


@pytest.mark.parametrize(("rank", "left"), [(0, "incomplete"), (1, "partial")])
def test_of_several_nodes_the_first_tidies(
    save: Path, again: Callable[..., list[Plan]], rank: int, left: str
) -> None:
    again(asked(save, nodes={"count": 2, "rank": rank, "master_addr": "first"}))
    assert checkpoints(save) == [f"iter_0000010.{left}"]


def test_checkpoints_of_another_machine_are_left_to_the_program(
    save: Path, again: Callable[..., list[Plan]]
) -> None:
    assert len(again(asked(save), job("ffffffff", save), seen=False)) == 1
    assert checkpoints(save) == ["iter_0000010.partial"]
    from_elsewhere = asked(save, checkpoint={"save": str(save), "load": "/pretrained"})
    with pytest.raises(UsageError, match="can't be seen from here"):
        again(from_elsewhere, seen=False)


def test_a_run_that_does_not_start_leaves_no_record(save: Path, plan: Callable[..., Plan]) -> None:
    record.make(RUN)

    def refuse(*_: Any, **__: Any) -> None:
        raise EngineError("no")

    chosen: Any = SimpleNamespace(start=refuse)
    first = start.First(replace(plan("gpt2-tiny.yaml"), run=RUN), ExitStack())
    with pytest.raises(EngineError):
        start.Attempts(asked(save), chosen, Stamp(RUN, ""), first)(0)
    assert not record.folder(RUN).exists()


def test_a_run_without_a_record_here_is_only_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "mine"))
    theirs = job(RUN, tmp_path)
    monkeypatch.setattr(start.find, "job", lambda text: ("engine", theirs))
    seen: list[dict[str, Any]] = []

    def supervise(*_: Any, **how: Any) -> Any:
        seen.append(how)
        return SimpleNamespace(code=3)

    monkeypatch.setattr(start, "supervise", supervise)
    assert start.attach(RUN) == 3
    assert seen == [{"job": theirs, "guest": True}]
    assert f"run {RUN} has no record here" in capsys.readouterr().err


def test_a_run_that_a_launcher_is_about_to_start_again_is_not_resumed(
    save: Path, plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    record.write(record.record_of(replace(plan("gpt2-tiny.yaml"), run=RUN), asked(save), "docker"))
    monkeypatch.setattr(start.find, "jobs", list)
    here: Any = None
    with owner.following(RUN), pytest.raises(UsageError, match=f"run {RUN} still goes on"):
        start.resumed(RUN, here, [])
    found, _ = start.resumed(RUN, here, [])
    assert found.config.checkpoint.load == str(save)


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("began", [False, True])
def test_the_same_is_the_same_though_it_saves_elsewhere_and_is_tied_or_has_a_secret(
    save: Path, monkeypatch: pytest.MonkeyPatch, *, tie: bool, began: bool
) -> None:
    checkpoint = Checkpoint(10, save / "iter_0000010")
    monkeypatch.setattr(folders, "newest_complete", lambda root: checkpoint if began else None)
    chosen: Any = NO_GPUS
    folder = {"save": str(save), "load": str(save)}
    wanted = asked(save, program="./own.py", env={"API_KEY": "x"}, checkpoint=folder)
    wanted = replace(wanted, tie=tie)
    plan = assemble(wanted, chosen, Stamp(RUN, "")).plan
    record.write(record.record_of(plan, wanted, "docker"))
    provenance.keep(plan, provenance.facts_of(plan, wanted, chosen, None))
    monkeypatch.setenv("API_KEY", "x")
    found, notes = start.repeated(RUN, chosen, force=False)
    assert notes == [f"it saves to {save}-rerun"]
    assert found.config.checkpoint.load == (str(save) if began else f"{save}-rerun")


ANOTHER = "aaaaaaaa"


@pytest.fixture
def theirs(save: Path) -> Path:
    """A folder with another run's checkpoints in it, complete at 3 and 6, cut short at 9."""
    for each in save.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    lineage.claim(save, ANOTHER, ANOTHER)
    for iteration in (3, 6):
        distributed(folders.partial(save, iteration))
        folders.publish(save, iteration)
    folders.folder(save, 9).mkdir()
    lineage.settle(save)
    return save


def plan_of(wanted: Asked) -> Plan:
    """Its plan, looked at as before a start."""
    chosen: Any = NO_GPUS
    return start.of_line(assemble(wanted, chosen, Stamp(RUN, "")).plan, wanted, chosen)


@pytest.mark.parametrize("finetune", [False, True])
def test_a_folder_with_another_runs_checkpoints_is_refused(theirs: Path, finetune: bool) -> None:
    """It was saved into without a word, and the other's newest was told as one's own."""
    load = {"load": str(theirs), "finetune": True} if finetune else {}
    wanted = asked(theirs, program="./own.py", checkpoint={"save": str(theirs), **load})
    with pytest.raises(UsageError, match="iter_0000009 is run aaaaaaaa's") as refused:
        plan_of(wanted)
    assert ("finetune" if finetune else "checkpoint.load=") in refused.value.remedy
    with pytest.raises(UsageError, match="iter_0000009 is run aaaaaaaa's"):
        start.check(wanted, cast(Any, NO_GPUS), preflight=False)


def test_what_names_the_folder_to_load_from_goes_on(theirs: Path, tmp_path: Path) -> None:
    """Under another name of it, too."""
    (tmp_path / "link").symlink_to(theirs)
    for load in (theirs, tmp_path / "link"):
        folder = {"save": str(theirs), "load": str(load)}
        plan = plan_of(asked(theirs, program="./own.py", checkpoint=folder))
        assert dict(plan.labels)[f"{LABEL}line"] == ANOTHER
        assert [mount.target for mount in plan.mounts if mount.source == str(theirs)] == [
            "/checkpoints"
        ]
    start.tidy(plan, asked(theirs).config)
    newest = start.find.newest(dict(plan.labels))
    assert newest is not None
    assert newest.iteration == 6
    assert "iter_0000009.incomplete" in checkpoints(theirs)
    nodes = {"count": 2, "rank": 1, "master_addr": "first"}  # whose launcher doesn't know its id
    plan = plan_of(asked(theirs, program="./own.py", nodes=nodes))
    newest = start.find.newest(dict(plan.labels))
    assert newest is not None
    assert newest.iteration == 6


def test_what_the_file_allows_is_saved_among_others_which_stay(theirs: Path) -> None:
    folder = {"save": str(theirs), "save_overwrite": True}
    plan = plan_of(asked(theirs, program="./own.py", checkpoint=folder))
    start.tidy(plan, asked(theirs).config)
    assert sorted(checkpoints(theirs)) == ["iter_0000003", "iter_0000006", "iter_0000009"]
    assert start.find.newest(dict(plan.labels)) is None
    assert "--save-overwrite" not in plan.argv


def test_a_run_whose_folder_another_has_gone_over_is_not_resumed_from_that(
    theirs: Path, plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    record.write(
        record.record_of(replace(plan("gpt2-tiny.yaml"), run=ANOTHER), asked(theirs), "docker")
    )
    monkeypatch.setattr(start.find, "jobs", list)
    here: Any = None
    start.resumed(ANOTHER, here, [])
    lineage.claim(theirs, RUN, RUN, overwrite=True)
    distributed(folders.partial(theirs, 12))
    folders.publish(theirs, 12)
    with pytest.raises(UsageError, match=f"iter_0000012 is run {RUN}'s"):
        start.resumed(ANOTHER, here, [])
