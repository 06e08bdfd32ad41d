"""What is made of records: listed, repeated, drawn."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from launcher import cli
from launcher.agent.checkpoints.folders import CheckpointFolder
from launcher.base import install
from launcher.base.errors import EngineError, UsageError
from launcher.base.settings import settings
from launcher.cli import main
from launcher.runs.follow.find import SilentBackends
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.job import ConnectionLost, ExitStatus
from launcher.runs.records import ending, metrics, owner, plot, record, recorded_runs, repeat
from launcher.runs.records.ending import Ending
from launcher.runs.records.metrics import Found, MemoryUse, TrainingStep, Validation
from launcher.runs.records.record import METRICS, Record
from launcher.runs.records.throughput import Rates
from launcher.runs.runfile.config import RunConfig
from tests.runs.conftest import FakeJob


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"name": "a", "image": "cpu", **sections})


def test_it_saves_elsewhere_and_finds_nothing_where_nothing_was(tmp_path: Path) -> None:
    (tmp_path / "ck-rerun").mkdir()
    asked = config(checkpoint={"save": "ck/", "load": f"{tmp_path}/ck"})
    found, notes = repeat.aside(asked, str(tmp_path), began=False)
    assert found.checkpoint.save == found.checkpoint.load == "ck-rerun2"
    assert notes == ["it saves to ck-rerun2"]
    assert repeat.aside(config(), str(tmp_path), began=False) == (config(), [])  # writes nothing


def test_it_goes_on_from_where_that_run_went_on(tmp_path: Path) -> None:
    asked = config(checkpoint={"save": "ck", "load": "ck"})
    found, _ = repeat.aside(asked, str(tmp_path), began=True)
    assert (found.checkpoint.save, found.checkpoint.load) == ("ck-rerun", "ck")
    asked = config(checkpoint={"save": "ck", "load": "other"}, logging={"tensorboard_dir": "tb"})
    found, _ = repeat.aside(asked, str(tmp_path), began=False)
    assert (found.checkpoint.load, found.logging.tensorboard_dir) == ("other", "tb-rerun")


def test_all_nodes_find_the_same_folder(tmp_path: Path) -> None:
    asked = config(checkpoint={"save": "ck"}, nodes={"count": 2, "master_addr": "a"})
    for name in ("ck-rerun", "ck-rerun"):
        found, _ = repeat.aside(asked, str(tmp_path), began=False)
        assert found.checkpoint.save == name
        (tmp_path / name).mkdir(exist_ok=True)  # by the first node, which waits for the others
    (tmp_path / "ck-rerun/iter_0000010").mkdir()
    found, _ = repeat.aside(asked, str(tmp_path), began=False)
    assert found.checkpoint.save == "ck-rerun2"


def test_a_task_of_an_array_learns_from_another_seed_in_folders_of_its_own() -> None:
    keys = {"checkpoint": {"save": "/ck/", "load": "/ck/"}, "slurm": {"array": "1-3"}}
    found = repeat.as_task(config(**keys, training={"seed": 7}), 3, "/")
    assert (found.training.seed, found.slurm.array) == (10, None)
    assert found.checkpoint.save == found.checkpoint.load == "/ck/3"
    assert found.env == {"SLURM_ARRAY_TASK_ID": "3"}
    assert repeat.as_task(config(), 3, "/").training.seed == 1237
    assert repeat.as_task(config(program="./own.py"), 3, "/").training.seed is None


def test_where_it_writes_over_what_that_run_wrote_is_told(tmp_path: Path) -> None:
    mounts = [
        {"source": "in", "target": "/in"},
        {"source": "out", "target": "/out", "read_only": False},
    ]
    _, notes = repeat.aside(
        config(mounts=mounts, resources={"workdir": "work"}), str(tmp_path), began=False
    )
    assert notes == [f"it writes to {folder}, as that run did" for folder in ("out", "work")]


def engine(now: str, *there: str, contained: bool = True) -> Any:
    """A backend whose image of any name has the id `now`, and that has the images `there`."""
    return SimpleNamespace(
        contained=contained,
        identity=lambda image: {"name": image, "id": {"megatron:cpu": now}[image]},
        facts=lambda image: ImageFacts() if image in there else None,
    )


def test_the_very_image_is_taken_while_it_is_there() -> None:
    asked, image = config(), {"name": "megatron:cpu", "id": "sha256:then"}
    then, name = "sha256:then", "megatron:cpu"
    assert repeat.pinned(asked, image, engine(then, name, then)) is asked
    assert repeat.pinned(asked, image, engine("sha256:now", name)) is asked  # and that is told of
    assert repeat.pinned(asked, image, engine("python 3", contained=False)) is asked
    assert repeat.pinned(asked, image, engine("sha256:now")) is asked  # nothing is left
    assert repeat.pinned(asked, image, engine("sha256:now", then)) != asked  # but for its name
    found = repeat.pinned(asked, image, engine("sha256:now", name, then))
    assert (found.image.name, found.image.tag) == ("sha256:then", None)
    kept = found.model_dump(mode="json", exclude_unset=True)
    assert RunConfig.model_validate(kept).image.name == "sha256:then"
    foreign = config(image={"name": "megatron:cpu", "megatron": "0.9.0"})
    found = repeat.pinned(foreign, image, engine("sha256:now", name, then))
    assert found.image.megatron == "0.9.0"  # which such an image doesn't say itself


def test_another_command_is_told() -> None:
    then = {"run": "0a1b", "argv": ["a", "--lr", "1", "/runs/0a1b"], "ulimits": [["stack", 1]]}
    same = {"run": "2c3d", "argv": ("a", "--lr", "1", "/runs/2c3d"), "ulimits": (("stack", 1),)}
    assert list(repeat.differences(then, same)) == []
    other = same | {"argv": ("a", "--lr", "2")}
    (line,) = repeat.differences(then, other)
    assert "--lr" in line


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
    ending.write_ending(IDS[1], 0, Ending(ExitStatus(0), False, ""), [], None)
    ending.write_ending(IDS[2], 0, Ending(ExitStatus(0), False, ""), [], None)
    ending.write_ending(IDS[2], 1, Ending(ExitStatus(7), False, ""), [], None)
    metrics = [{"kind": "step", "iteration": n, "loss": n / 2} for n in range(1, 4)]
    lines = "".join(json.dumps(one) + "\n" for one in [*metrics, {"kind": "validation"}])
    (tmp_path / IDS[1] / record.METRICS).write_text(lines + '{"kind": "st')
    return tmp_path


def job(run: str, **more: Any) -> Any:
    return FakeJob(run=run, **more)


def known() -> list[recorded_runs.RunSummary]:
    lost = job(IDS[3], end=ConnectionLost("gone"))
    return recorded_runs.known([job(IDS[0]), job(IDS[3], over=True), lost])


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
        (recorded_runs.Filter(), "abcd"),
        (recorded_runs.Filter(states=("failed", "unknown")), "cd"),
        (recorded_runs.Filter(name="demo"), "ac"),
        (recorded_runs.Filter(name="d?m*"), "ac"),  # a pattern listed none
        (recorded_runs.Filter(since=NOW - timedelta(days=15)), "ab"),
        (recorded_runs.Filter(before=NOW - timedelta(days=15)), "cd"),
        (recorded_runs.Filter(name="demo", before=NOW - timedelta(days=15)), "c"),
    ],
)
def test_filters(wanted: recorded_runs.Filter, found: str) -> None:
    assert "".join(run.run[0] for run in known() if wanted.takes(run)) == found


def test_what_is_pruned_has_ended_and_is_none_of_the_newest(kept: Path) -> None:
    assert [run.run for run in recorded_runs.to_prune(known(), recorded_runs.Filter(), 0)] == [
        *IDS[1:3]
    ]
    assert [run.run for run in recorded_runs.to_prune(known(), recorded_runs.Filter(), 2)] == [
        IDS[2]
    ]
    assert recorded_runs.to_prune(known(), recorded_runs.Filter(states=("running",)), 0) == []
    assert recorded_runs.to_prune(known(), recorded_runs.Filter(states=("failed",)), 1) == []
    assert [
        run.run for run in recorded_runs.to_prune(known(), recorded_runs.Filter(name="demo"), 1)
    ] == [IDS[2]]
    (paused, *_) = recorded_runs.known([job(IDS[0], doing="paused")])
    assert paused.state == "paused"
    assert paused not in recorded_runs.to_prune([paused], recorded_runs.Filter(), 0)
    unknown = recorded_runs.Filter(states=("unknown",))  # it may go on
    assert [run.run for run in recorded_runs.to_prune(known(), unknown, 0)] == [IDS[3]]
    (kept / IDS[2] / "log.2").touch()  # begun, and not ended as far as is known here
    assert known()[2].state == "unknown"
    assert [run.run for run in recorded_runs.to_prune(known(), recorded_runs.Filter(), 0)] == [
        IDS[1]
    ]


def test_a_list_reads_little_of_large_files_and_looks_up_the_settings_once(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """5,000 records took 10.8 s of CPU: each looked five times for the folder that all lie in.

    All facts were parsed for a name, and 64 KiB for one step.
    """
    step = json.dumps({"kind": "step", "iteration": 9, "loss": 1.0}) + "\n"
    facts = {
        "host": {"name": '\n "image": {\n  "name": "x"'},
        "image": {"name": 'a"é', "labels": {}},
    }
    for run in IDS:
        record.put(run, record.FACTS, facts | {"config": ["x"] * 100_000})
        (kept / run / record.METRICS).write_text(step * 10_000)
    looked, parsed = list[Path](), list[int]()
    usual, load = settings().runs, json.loads
    for module in (record, recorded_runs):
        monkeypatch.setattr(module, "runs_folder", lambda: (looked.append(usual), usual)[1])
    monkeypatch.setattr(json, "loads", lambda text: (parsed.append(len(text)), load(text))[1])
    before = bytes_read()
    found = known()
    assert bytes_read() - before < len(IDS) * 20_000
    assert sum(parsed) < len(IDS) * 1_000
    assert len(looked) == 2
    assert {(run.image, run.iteration) for run in found} == {('a"é', 9)}


def bytes_read() -> int:
    """How many this process has read."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@pytest.mark.parametrize(("saved", "told"), [(59, 59), (2, 3), (None, 3)])
def test_the_iteration_is_the_newest_that_was_logged_or_saved(
    kept: Path, saved: int | None, told: int
) -> None:
    """It was 50, the last one logged, of a run that saved 59."""
    (kept / IDS[1] / record.ENDINGS).unlink()
    newest = CheckpointFolder(saved, kept) if saved else None
    ending.write_ending(IDS[1], 0, Ending(ExitStatus(143), True, ""), [], newest)
    assert (known()[1].state, known()[1].iteration) == ("stopped", told)


@pytest.mark.parametrize("image", [None, {}, {"id": "x"}, {"labels": {}, "name": "late"}])
def test_an_image_is_named_by_facts_in_any_order(kept: Path, image: Any) -> None:
    record.put(IDS[0], record.FACTS, {"files": {"image": {"name": "no"}}, "image": image})
    assert record.image_name(kept / IDS[0] / record.FACTS) == (image or {}).get("name", "")


@given(st.lists(st.integers(0, 3 * record.BLOCK), max_size=8), st.integers(0, 20))
def test_the_newest_lines_are_those_of_the_file_backwards(sizes: list[int], cut: int) -> None:
    """A line that lies across what is read at once would be lost, or be told twice."""
    told = [{"at": at, "text": "x" * size} for at, size in enumerate(sizes)]
    text = "".join(json.dumps(one) + "\n" for one in told).encode()
    with tempfile.NamedTemporaryFile() as file:
        file.write(text[: max(0, len(text) - cut)])
        file.flush()
        whole = [*record.read_lines(file.name)]
        assert [*record.newest_lines(file.name, 1 << 20)] == whole[::-1]
        few = [*record.newest_lines(file.name, record.BLOCK)]
        assert few == whole[::-1][: len(few)]


@pytest.mark.parametrize("piece", [1, 7, record.PIECE])
@pytest.mark.parametrize(
    "odd", [b"", b"{", b"1", b'{"a": 1} {"b": 2}', b'{"at": "\\udcff"}', b"\xff"]
)
def test_a_line_that_is_not_whole_takes_no_other_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: bytes, piece: int
) -> None:
    """Lines are parsed together, and one of them could spoil all."""
    monkeypatch.setattr(record, "PIECE", piece)
    (tmp_path / "lines").write_bytes(b'{"at": 1}\n' + odd + b'\n\n{"at": 2}\n{"at": 3}')
    found = [one["at"] for one in record.read_lines(tmp_path / "lines")]
    assert [at for at in found if at != "\udcff"] == [1, 2, 3]
    assert ("\udcff" in found) == (b"udcff" in odd)


def test_ages() -> None:
    hours = {"30m": 0.5, "12h": 12, "7d": 168, "2w": 336}
    assert {
        age: (NOW - recorded_runs.ago(age, NOW)).total_seconds() / 3600 for age in hours
    } == hours
    for age in ("", "7", "d", "-1d", "7y", "999999d"):
        with pytest.raises(UsageError):
            recorded_runs.ago(age, NOW)


@pytest.fixture
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.runs.follow.find.everywhere", lambda: ([], []))


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


@pytest.mark.usefixtures("_no_engine")
def test_a_run_that_finished_is_explained_as_one(
    kept: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was said to have no known cause, as if it had failed."""
    (kept / IDS[1] / record.LOG).write_text("as it was\n")
    assert main(["explain", IDS[1]]) == 1
    assert capfd.readouterr().out == f"run {IDS[1]} finished: it didn't fail\n"


def test_a_run_that_nobody_followed_is_listed_with_what_shows_its_end(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It was unknown, with nothing to do about it, though ps knew the exit code."""
    known = [(None, job(run, end=ExitStatus(137), over=True, doing="exited")) for run in IDS[1:]]
    monkeypatch.setattr("launcher.runs.follow.find.everywhere", lambda: (known, []))
    assert main(["runs"]) == 0
    assert [line for line in capfd.readouterr().err.splitlines() if "attach" in line] == [
        f"launcher: run {IDS[3]} ended while no launcher followed it; see: launcher attach {IDS[3]}"
    ]


def test_a_log_that_is_kept_is_read_though_no_engine_answers(
    kept: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def silent() -> Any:
        return [], [SilentBackends(("docker",), EngineError("no container engine answers"))]

    monkeypatch.setattr("launcher.runs.follow.find.everywhere", silent)
    assert main(["logs", IDS[1]]) == 125
    assert "no container engine answers" in capfd.readouterr().err
    (kept / IDS[1] / record.LOG).write_text("as it was\n")
    assert main(["logs", IDS[1]]) == 0
    told = capfd.readouterr()
    assert told.out == "as it was\n"
    assert "an engine doesn't answer" in told.err
    assert main(["logs", "nothing"]) == 125


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


def step(iteration: int, loss: float | None, ms: float = 100.0, batch: int = 8) -> TrainingStep:
    return TrainingStep(iteration, 100, ms, loss=loss, global_batch_size=batch)


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
            *(
                (0, MemoryUse(0, 1, 5.0)),
                (0, step(1, None)),
                (0, step(2, nan)),
                (0, step(3, 2.0, 50)),
            ),
            (0, Validation(3, loss=2.1)),
            (0, Validation(3, dataset=1, loss=9.0)),
            (0, Validation(3, split="test", loss=9.0)),
        ),
    )
    assert (found.train, found.validation, found.tokens) == ([(3, 2.0)], [(3, 2.1)], [])
    assert found.samples == [(1, 80.0), (2, 80.0), (3, 160.0)]


def has(picture: Path, colour: tuple[int, int, int]) -> bool:
    """Whether a pixel of it has that colour."""
    pixels = (imread(picture)[:, :, :3] * 255).round()
    return bool((pixels == colour).all(axis=2).any())


def test_two_runs_in_one_picture(
    keep: Keep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep("0a1b2c3d", "a", *((0, step(i, 3.0 - i / 10), Rates(1000.0, 1.0)) for i in range(1, 9)))
    keep("1a1b2c3d", "b", *((0, step(i, 4.0 - i / 10)) for i in range(1, 9)))
    assert cli.main(["plot", "a", "1a1b", "a", "-o", "both.png"]) == 0
    assert capsys.readouterr().out == "both.png\n"
    picture = tmp_path / "both.png"
    assert picture.read_bytes().startswith(PNG)
    assert has(picture, BLUE)
    assert has(picture, ORANGE)
    assert cli.main(["plot", "b"]) == 0  # without rates
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
    monkeypatch.setitem(install.GROUPS, "plot", ("nowhere_to_be_found",))
    monkeypatch.setattr("launcher.base.settings.ROOT", Path("installed"))
    with pytest.raises(UsageError, match="has no nowhere_to_be_found") as error:
        plot.plot(["a"], Path("a.png"))
    assert error.value.remedy.endswith("-m pip install 'megatron-launchpad[plot]'")
