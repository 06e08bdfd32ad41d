"""A bisect: what it keeps, how it goes on, what it says."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.base.screen import Progress
from launcher.cli import main
from launcher.runs.records import record, recorded_runs
from launcher.runs.runfile import origins
from launcher.tools.bisect import bisect, bisect_report, checkouts, ends, kept, trial
from launcher.tools.bisect.axes import Candidate
from launcher.tools.bisect.bisect import BisectRequest, NothingFoundError
from launcher.tools.bisect.judge import Judge, TrialOutcome

FILE = {
    "name": "a",
    "image": "cpu",
    "gpus": 0,
    "training": {"lr": 1.0},
    "data": {"mock": True, "vocab_size": 8},
}
OTHER = {
    "model": {"swiglu": True, "num_layers": 3},
    "training": {"lr": 9.0, "clip_grad": 2.0, "seed": 4},
    "data": {"mock": True, "vocab_size": 9},
    "env": {"A": "1", "API_KEY": "very-secret"},
}
REQUEST = BisectRequest(Judge(), backend="local")


class Trials:
    """Stands in for runs: those that clip gradients fail; the one numbered `killed` never ends."""

    def __init__(self) -> None:
        self.made = list[Candidate]()
        self.killed, self.code = 0, 1

    def __call__(self, run: Any, candidate: Candidate, number: int) -> TrialOutcome:
        if number == self.killed:
            raise KeyboardInterrupt
        self.made.append(candidate)
        fails = "clip_grad" in candidate.config["training"]
        loss = 9.0 if fails else 3.0
        code = self.code if fails else 0
        return TrialOutcome(code, "it clips" if code else "", loss=loss, seconds=1.0)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Trials:
    """Files good.yaml and bad.yaml in the current folder, records of its own, and no real run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    Path("good.yaml").write_text(json.dumps(FILE))
    Path("bad.yaml").write_text(json.dumps(FILE | OTHER))
    made = Trials()
    monkeypatch.setattr(trial.ShortRun, "__call__", lambda *given: made(*given))
    return made


def found(request: BisectRequest = REQUEST) -> dict[str, Any]:
    return bisect_report.as_json(bisect.bisect("good.yaml", "bad.yaml", request, Progress()))


def test_a_key_is_found_within_the_bound_and_said(trials: Trials) -> None:
    answer = bisect.bisect("good.yaml", "bad.yaml", REQUEST, Progress())
    told = bisect_report.as_json(answer)
    (cause,) = told["causes"]
    assert (cause["kind"], cause["name"]) == ("key", "training.clip_grad")
    assert (cause["last_good"], cause["first_bad"]) == ("not set", "2.0")
    assert (told["differences"], told["enough"]) == (8, True)
    assert told["trials"] == len(trials.made) <= 3 + 2
    text = bisect_report.text(answer)
    assert "what makes it fail:\n  key training.clip_grad: not set → 2.0\n" in text
    assert "\n  GOOD fails with this alone\n" in text


def test_it_goes_on_where_it_was_killed(trials: Trials) -> None:
    """A bisect takes hours, and the machine is somebody else's at night."""
    wanted = len(found(replace(REQUEST, steps=3)) and trials.made)
    trials.made.clear()
    for trials.killed in (3, 5):
        with pytest.raises(KeyboardInterrupt):
            found()
    trials.killed = 0
    assert found()["trials"] == len(trials.made) == wanted
    assert found()["trials"] == len(trials.made)
    found(replace(REQUEST, fresh=True))
    assert len(trials.made) == 2 * wanted


def test_its_folder_is_pruned_unless_somebody_is_at_it(
    trials: Trials, capsys: pytest.CaptureFixture[str]
) -> None:
    """`runs prune` left them for ever: they have no run's record."""
    folder = record.folder(found()["folder"])
    (folder.parent / "bisect-of-mine").mkdir()
    with files.folder_lock(folder):
        assert main(["runs", "prune", "--state", "finished"]) == 0
    assert folder.exists()
    assert main(["runs", "prune", "--keep", "1"]) == 0
    assert folder.exists()
    assert main(["runs", "prune", "--state", "finished"]) == 0
    assert sorted(path.name for path in folder.parent.glob("bisect*")) == ["bisect-of-mine"]
    assert folder.name in capsys.readouterr().out


def test_one_that_began_since_prune_listed_it_stays(
    trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder went from under it."""
    listed, freed = found() and [*kept.summaries()], list[int | None]()
    tried = trials.__call__

    def pruned(*given: Any) -> TrialOutcome:
        freed.extend(map(recorded_runs.prune, listed))
        return tried(*given)

    monkeypatch.setattr(trial.ShortRun, "__call__", pruned)
    found(replace(REQUEST, fresh=True))
    assert {*freed} == {None}


def test_a_line_that_was_cut_off_is_tried_again(trials: Trials) -> None:
    told = found()
    path = record.folder(told["folder"]) / bisect.TRIALS
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    before = len(trials.made)
    for _ in range(2):
        assert found()["causes"] == told["causes"]
    assert len(trials.made) == before + 1


def test_it_goes_on_where_it_was_killed_before_its_first_trial(trials: Trials) -> None:
    """Between two files: each later bisect of these ends stopped at the one that wasn't there."""
    told = found()
    (record.folder(told["folder"]) / bisect.TRIALS).unlink()
    assert found()["causes"] == told["causes"]


def test_a_trial_in_another_launchers_words_is_tried_again(trials: Trials) -> None:
    told = found()
    path = record.folder(told["folder"]) / bisect.TRIALS
    first, *rest = path.read_text().splitlines(keepends=True)
    other = first.replace('"outcome": {', '"outcome": {"new": 1, ')
    path.write_text("".join([other, "{}\n", *rest]))
    before = len(trials.made)
    assert found()["causes"] == told["causes"]
    assert len(trials.made) == before + 1


def test_more_time_for_a_run_tries_it_again(trials: Trials) -> None:
    """One that took too long stayed a failure, whatever --seconds said."""
    before = len(found() and trials.made)
    found(replace(REQUEST, seconds=REQUEST.seconds * 2))
    assert len(trials.made) == 2 * before


def test_another_judge_asks_what_was_tried_already(trials: Trials) -> None:
    """The trials are the same; it tried all of them again."""
    trials.code = 0
    told = found(replace(REQUEST, judge=Judge(loss=1.0)))
    assert [cause["name"] for cause in told["causes"]] == ["training.clip_grad"]
    before = len(trials.made)
    assert found(replace(REQUEST, judge=Judge(loss=2.0))) == told
    assert len(trials.made) == before


def test_no_secret_is_kept(trials: Trials) -> None:
    folder = record.folder(found()["folder"])
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert b"API_KEY" in kept
    assert b"very-secret" not in kept


@pytest.mark.parametrize(
    ("end", "fails", "said"),
    [("good.yaml", True, "GOOD fails here as well"), ("bad.yaml", False, "BAD doesn't fail here")],
)
def test_ends_that_are_alike_are_an_answer_of_its_own(
    trials: Trials, end: str, fails: bool, said: str
) -> None:
    """Else the first difference is blamed on a machine whose disk is full."""
    file = json.loads(Path(end).read_text())
    file["training"] = {"lr": 2.0} | ({"clip_grad": 1.0} if fails else {})
    Path(end).write_text(json.dumps(file))
    with pytest.raises(NothingFoundError, match=said) as raised:
        found()
    assert raised.value.exit_code == 1


def test_a_backend_elsewhere_is_refused(trials: Trials) -> None:
    with pytest.raises(UsageError, match="trials run on this machine"):
        found(replace(REQUEST, backend="slurm"))


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A clone of Megatron-LM with releases 0.10.0 and 0.11.0, and four commits between them."""
    own = ("-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "gc.auto=0")
    folder = tmp_path / "clone"
    folder.mkdir()

    def git(*words: str) -> None:
        subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)

    git("init", "--quiet")
    for name in ("core_v0.10.0", "a", "b", "c", "d", "core_v0.11.0"):
        git("commit", "--quiet", "--allow-empty", "-m", name)
        git("tag", name)
    return folder


def test_from_a_release_it_goes_on_to_a_commit(
    trials: Trials, megatron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release has a thousand commits. They run in the image of the last good release."""
    first_bad, *later = (
        checkouts.checkout(megatron, name).commit for name in ("c", "d", "core_v0.11.0")
    )

    def tried(_: Any, candidate: Candidate, number: int) -> TrialOutcome:
        trials.made.append(candidate)
        assert candidate.build
        fails = candidate.build.release not in ("0.9.0", "0.10.0")
        if candidate.checkout:
            fails = candidate.checkout.commit in (first_bad, *later)
        return TrialOutcome(int(fails), "x" if fails else "")

    monkeypatch.setattr(trial.ShortRun, "__call__", tried)
    for name, release in (("good", "0.9.0"), ("bad", "0.16.1")):
        image = {"tag": "24.10", "megatron": release}
        Path(f"{name}.yaml").write_text(json.dumps(FILE | {"image": image}))
    request = replace(REQUEST, backend="docker", history=megatron)
    answer = bisect.bisect("good.yaml", "bad.yaml", request, Progress())
    told = bisect_report.as_json(answer)
    (release,), (commit,) = told["causes"], told["commits"]["causes"]
    assert (release["last_good"], release["first_bad"]) == ("0.10.0", "0.11.0")
    assert commit["first_bad"] == first_bad[:10]
    assert trials.made[-1].build == ends.RowBuild("24.10", "0.10.0")
    assert "A: c" in bisect_report.text(answer)

    (alone,) = bisect.bisect("good.yaml", "bad.yaml", replace(request, history=None), Progress())
    assert alone.untried == (
        "the commits from core_v0.10.0 to core_v0.11.0: --history names a clone of Megatron-LM",
    )


def test_what_does_not_differ_is_refused_before_any_trial(trials: Trials) -> None:
    with pytest.raises(UsageError, match=r"differ in nothing that can be tried"):
        bisect.bisect("good.yaml", "good.yaml", REQUEST, Progress())
    assert trials.made == []


def test_the_command_prints_it(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "good.yaml", "bad.yaml", "--backend", "local", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["causes"][0]["name"] == "training.clip_grad"
    assert "trial 1: BAD: bad (1 s): exit code 1: it clips" in printed.err


def test_the_ends_may_be_runs_rows_and_presets(trials: Trials) -> None:
    kept = record.Record("abc1", "old", "", "local", "/x", "f", FILE, ("--y",), 1)
    record.write(kept)
    run = ends.find("old", "", [])
    assert (run.cwd, run.rest, run.backend) == ("/x", ("--y",), "local")
    assert run.build == ends.RowBuild("cpu", "0.16.1")
    row = ends.find("24.10", "good.yaml", [])
    assert (row.config.name, row.build) == ("a", ends.RowBuild("24.10", "0.9.0"))
    assert ends.find("gpt2-tiny", "", []).config.name == "gpt2-tiny"
    for text in ("nothing", "nothing@HEAD", "good.yaml@HEAD"):
        with pytest.raises(UsageError, match=r"no run, no file|has no `source`"):
            ends.find(text, "", [])


def test_a_short_run_writes_nowhere_else_and_keeps_its_schedule(tmp_path: Path) -> None:
    """It would have saved over the user's checkpoints."""
    own = {
        "checkpoint": {"save": "ckpt", "load": "ckpt"},
        "logging": {"tensorboard_dir": "tb", "wandb_project": "p", "log_interval": 9},
        "training": {"train_iters": 500},
    }
    short = trial.shortened(origins.made(FILE | own, "test"), 7, "/here", tmp_path)
    assert short.checkpoint.save == short.checkpoint.load == f"{tmp_path}/written-ckpt"
    assert short.logging.tensorboard_dir == f"{tmp_path}/written-tb"
    assert short.logging.wandb_project is None
    assert (short.training.train_iters, short.training.seed) == (500, 1234)
    assert short.megatron_args["exit_interval"] == 7
    assert short.logging.log_interval == 1
