"""What is read of a trial: its cause, its loss, its time; and a run that takes too long."""

from __future__ import annotations

import os
import subprocess
import sys
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import EngineError
from launcher.base.screen import Progress
from launcher.runs.runfile import origins
from launcher.tools.bisect import trial
from launcher.tools.bisect.axes import Candidate
from launcher.tools.bisect.halving import Verdict
from launcher.tools.bisect.judge import Judge, TrialOutcome
from launcher.tools.bisect.trial import ShortRun

CONFIG = origins.made({"name": "a", "image": "cpu", "gpus": 0, "data": {"mock": True}}, "test")
CANDIDATE = Candidate(
    CONFIG.model_dump(exclude_unset=True), "/", (), {"tag": "cpu"}, None, None, None
)


@pytest.mark.parametrize(
    ("lines", "code", "cause"),
    [
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to"], 1, "GPU memory is out"),
        (["x.y.StrangeError: 17"], 1, "StrangeError"),
        (["nothing of note"], 9, "exit code 9"),
        (["launcher: warning: a", "launcher: model.x: wrong", "  Mend it."], 2, "model.x: wrong"),
    ],
)
def test_why_a_run_failed(lines: list[str], code: int, cause: str) -> None:
    assert trial.cause_of(lines, code, refused=code == 2)[0] == cause


def test_the_loss_is_that_of_the_last_step_that_logged_one() -> None:
    """JSON has no NaN: the log has null for it, and a diverged run counted as one without loss."""
    assert trial.loss_of([{"loss": 3.0}, {"loss": 2.5}, {"iteration": 3}]) == 2.5
    assert isnan(trial.loss_of([{"loss": 3.0}, {"loss": None}]) or 0)
    assert trial.loss_of([]) is None


def test_a_steps_time_is_without_those_that_compile() -> None:
    steps = [{"ms_per_step": ms} for ms in (9000.0, 400.0, 10.0, 12.0, 50.0)]
    assert trial.ms_of(steps) == 12.0
    assert trial.ms_of(steps[:2]) is None


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A hang would have held a bisect for the night."""
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    with (tmp_path / "log").open("wb") as output:
        assert trial.finished(sleep, "/", os.environ, output.fileno(), 0.3) is None


def test_a_run_ends_with_a_bisect_that_is_killed() -> None:
    """It went on beside the same command's next one, on the same GPUs."""
    forever = "import time; print(1, flush=True); time.sleep(600)"
    code = "import os, sys; from launcher.tools.bisect import trial; "
    code += f"trial.finished([sys.executable, '-c', {forever!r}], '/', os.environ, 1, 600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
        process.kill()
        assert process.communicate(timeout=300) == (b"", None)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs the candidate with a launcher that prints, logs steps, and ends as it is told."""
    monkeypatch.setenv("LAUNCHER_CACHE", str(tmp_path / "cache"))

    def run(code: int | None, printed: str = "", steps: str = "", check: str = "") -> TrialOutcome:
        def finished(argv: Any, cwd: Any, env: Any, output: int, seconds: float) -> int | None:
            os.write(output, printed.encode())
            folder = Path(env["LAUNCHER_RUNS"], os.urandom(4).hex())
            folder.mkdir(parents=True)
            (folder / "run.json").write_text("{}")
            (folder / "metrics.jsonl").write_text(steps)
            return code

        monkeypatch.setattr(trial, "finished", finished)
        return ShortRun(tmp_path, "docker", 3, 9.0, Progress(), check)(CANDIDATE, 1)

    return run


STEP = '{"kind": "step", "attempt": 0, "iteration": 1, "loss": 4.5, "ms_per_step": 3.0}\n'


def test_a_trial_is_read_of_its_own_record_alone(run: Any) -> None:
    """One that was killed and tried again had the steps of both."""
    assert run(0, steps=STEP.replace("4.5", "8.5")).loss == 8.5
    found = run(0, steps=STEP)
    assert (found.code, found.loss, found.cause) == (0, 4.5, "")


def test_the_users_command_finds_the_run(run: Any) -> None:
    check = 'grep -q hello "$BISECT_LOG" && test -f "$BISECT_RECORD/run.json" && exit $BISECT_CODE'
    assert run(7, "hello\n", check=check).check == 7
    assert run(7, "bye\n", check=check).check == 1
    assert run(121, "launcher: refused\n", check=check).check is None


def test_a_program_may_end_with_a_code_that_the_launcher_has_too(run: Any) -> None:
    """argparse's 2 was a refusal, whose cause was the record's path: each trial had another."""
    said = "launcher: run {} failed: rank 1 exited with code 2\nlauncher: its record: /r/{}\n"
    one, other = (
        run(2, said.format(name, name), check="true") for name in ("0b864074", "fc0290ab")
    )
    assert one.told == "exit code 2, the command: 0"
    assert Judge().verdict(other, None, one) is Verdict.BAD
    refused = run(121, said.replace("{}", "0b864074"))
    assert refused.cause == "run 0b864074 failed: rank 1 exited with code 2"
    assert Judge().verdict(run(121, said.replace("{}", "fc0290ab")), None, refused) is Verdict.BAD


def test_a_hang_is_a_failure_of_its_own_kind(run: Any) -> None:
    found = run(None)
    assert (found.code, found.cause) == (trial.LATE, "it took longer than 9 s")


@pytest.mark.parametrize(
    ("code", "error"), [(125, EngineError), (123, EngineError), (130, KeyboardInterrupt)]
)
def test_what_is_no_answer_of_the_run_ends_the_bisect(run: Any, code: int, error: type) -> None:
    """Else it is kept as an answer for ever."""
    with pytest.raises(error):
        run(code, "launcher: the engine is gone\n")
