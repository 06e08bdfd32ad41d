"""Carries a trial out: builds the image, runs a few steps by the launcher's own command, looks."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from launcher.agent.ranks import rank
from launcher.base import files, owned
from launcher.base.errors import EngineError, LauncherError
from launcher.base.screen import Progress
from launcher.base.settings import ROOT, settings
from launcher.runs.explain import failures
from launcher.runs.plan.program import ProgramKind, program
from launcher.runs.records import plot, record, repeat
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Override
from launcher.tools.bisect.axes import Candidate
from launcher.tools.bisect.built import build
from launcher.tools.bisect.judge import TrialOutcome
from launcher.tools.trials.trials import LONGEST, end

USAGE, REFUSED = 2, (121, 122)
"""Exit codes of the launcher, where the run wasn't started: its own words say why.

The first is a program's own, too: the launcher's where there is no record of a run.
"""

LOST = (123, 125)
INTERRUPTED = (130, 143)
LATE = -1
"""In place of the exit code of a run that took too long."""

WARMING = 2
"""Steps that compile, and aren't timed."""

SHOWN = 200
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
EXCEPTION = re.compile(r"\b(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception))\b")


class Trial(Protocol):
    """Tries a run: builds what it needs, runs it, and says what came of it."""

    def __call__(self, candidate: Candidate, number: int) -> TrialOutcome:
        """The outcome of trial `number`. Raises EngineError where the engine is lost."""


@dataclass(frozen=True)
class ShortRun:
    """Runs `steps` steps with the launcher, on one seed; a Trial.

    folder: where logs and records of trials go. seconds: that a run may take. check: a shell
    command that says whether a run that was started is good.
    """

    folder: Path
    backend: str
    steps: int
    seconds: float
    progress: Progress
    check: str = ""

    def __call__(self, candidate: Candidate, number: int) -> TrialOutcome:
        began = time.monotonic()
        with owned.scratch(settings().cache) as scratch:
            try:
                config = self._config(candidate, scratch, number)
                outcome = self._run(candidate, config, scratch, number)
            except LauncherError as error:
                if isinstance(error, EngineError):
                    raise
                outcome = TrialOutcome(why=" ".join(str(error).split())[:SHOWN])
        return replace(outcome, seconds=time.monotonic() - began)

    def _config(self, candidate: Candidate, scratch: Path, number: int) -> RunConfig:
        """The run file of the trial, with its image built and its checkout written.

        Raises LauncherError where it can't be made.
        """
        own: dict[str, Any] = {"name": f"bisect-{number}", "image": {**candidate.image}}
        config = origins.made({**candidate.config, **own}, "these keys")
        if candidate.checkout:
            own["source"] = str(candidate.checkout.write(scratch / "source"))
        if candidate.build:
            name = build(candidate.build, candidate.packages, self.progress)
            own["image"] = {"name": name, "python": config.image.python}
        config = origins.overridden(config, [Override("bisect", own)])
        return shortened(config, self.steps, candidate.cwd, scratch)

    def _run(
        self, candidate: Candidate, config: RunConfig, scratch: Path, number: int
    ) -> TrialOutcome:
        """What came of the run. Raises EngineError where that is lost."""
        file, log, runs = scratch / "run.yaml", self.folder / f"{number}.log", self.folder / "runs"
        file.write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
        argv = [sys.executable, "-m", "launcher", "run", str(file), "--backend", self.backend]
        argv += ["--tie", *(["--", *candidate.rest] if candidate.rest else [])]
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = os.environ | {"LAUNCHER_RUNS": str(runs), "PYTHONPATH": search}
        before = {*runs.glob(f"*/{record.FILE}")}
        with open(files.open_own(log, NEW), "wb") as output:
            code = finished(argv, candidate.cwd, env, output.fileno(), self.seconds)
        text = log.read_text(encoding="utf-8", errors="replace")
        lines = text.replace(f"{scratch}/", "").splitlines()
        if code in LOST:
            raise EngineError(*_own_words(lines))
        if code in INTERRUPTED:
            raise KeyboardInterrupt
        kept = next((one.parent for one in {*runs.glob(f"*/{record.FILE}")} - before), None)
        outcome = replace(self._outcome(lines, code, kept), log=str(log))
        if not self.check or is_refusal(code, kept):
            return outcome
        told = {"BISECT_LOG": str(log), "BISECT_RECORD": str(kept or "")}
        told |= {"BISECT_CODE": str(outcome.code)}
        done = subprocess.run(
            ["sh", "-c", self.check], cwd=candidate.cwd, env=env | told, stdout=sys.stderr
        )
        return replace(outcome, check=done.returncode)

    def _outcome(self, lines: Sequence[str], code: int | None, kept: Path | None) -> TrialOutcome:
        """What came of a run with this output and this record; code: None where it was too late."""
        if code is None:
            return TrialOutcome(LATE, f"it took longer than {self.seconds:g} s")
        metrics = plot.continued(record.read_lines(kept / record.METRICS)) if kept else []
        steps = [one for one in metrics if one["kind"] == plot.STEP]
        refused = is_refusal(code, kept)
        cause, said = cause_of(lines, code, refused=refused) if code else ("", "")
        return TrialOutcome(code, cause, said, loss_of(steps), ms_of(steps))


def shortened(config: RunConfig, steps: int, cwd: str, scratch: Path) -> RunConfig:
    """The run of a few steps, which logs each, and writes to `scratch` what it saves.

    Schedules are those of the whole run. Raises UsageError.
    """

    def named(folder: str) -> str:
        return str(scratch / f"written-{re.sub(r'[^0-9A-Za-z]+', '-', folder)}")

    config, _ = repeat.aside(config, cwd, began=False, named=named)
    nothing = [f"logging.wandb_{name}" for name in ("project", "exp_name", "save_dir")]
    keys: dict[str, Any] = dict.fromkeys([*nothing, "profile"])
    keys |= {"max_restarts": 0}
    if program(config.program).kind is not ProgramKind.SCRIPT:
        keys |= {"megatron_args.exit_interval": steps, "logging.log_interval": 1}
        keys |= {} if config.training.seed is not None else {"training.seed": repeat.SEED}
    return origins.overridden(config, [Override("bisect", keys)])


def finished(
    argv: Sequence[str], cwd: str, env: Mapping[str, str], output: int, seconds: float
) -> int | None:
    """Run a launcher; its exit code, None where it took too long and was ended.

    It ends with this process, even by SIGKILL: a trial that goes on takes the next one's GPUs.
    """
    argv = [sys.executable, "-I", rank.__file__, str(os.getpid()), *argv]
    pipes: dict[str, Any] = {"stdout": output, "stderr": output}
    with subprocess.Popen(
        argv, cwd=cwd, env=env, text=True, stdin=subprocess.DEVNULL, **pipes
    ) as process:
        try:
            return process.wait(timeout=min(seconds, LONGEST))
        except subprocess.TimeoutExpired:
            end(process)
            return None
        except BaseException:
            end(process)
            raise


def is_refusal(code: int | None, kept: Path | None) -> bool:
    """Whether no run was started: by the code alone, or as there is no record `kept` of one."""
    return code in REFUSED or (code == USAGE and kept is None)


def cause_of(lines: Sequence[str], code: int, *, refused: bool) -> tuple[str, str]:
    """Why a run failed, and the line that shows it.

    It is the known cause, else the class of its first exception; of a refusal, its words.
    """
    if refused:
        return _own_words(lines)[0], ""
    found = failures.explain([f"{line}\n".encode() for line in lines])
    for sign in found.signs[:1]:
        return sign.failure.name, sign.said.text[:SHOWN] if sign.said else ""
    for suspect in found.suspects:
        if raised := EXCEPTION.search(suspect.text):
            return raised[1], suspect.text[:SHOWN]
    return f"exit code {code}", ""


def _own_words(lines: Sequence[str]) -> tuple[str, str]:
    """The launcher's last words, and the lines after them, which mend it."""
    marks = [(at, line) for at, line in enumerate(lines) if line.startswith("launcher: ")]
    own = [at for at, line in marks if not line.startswith("launcher: its record: ")]
    if not own:
        return "the launcher ended without a word", ""
    return lines[own[-1]].removeprefix("launcher: "), "\n".join(lines[own[-1] + 1 :]).strip()


def loss_of(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The loss of the last step that logged one; NaN where it isn't a number."""
    for step in reversed(steps):
        if "loss" in step:
            return float("nan") if step["loss"] is None else float(step["loss"])
    return None


def ms_of(steps: Sequence[Mapping[str, Any]]) -> float | None:
    """The median of the steps' ms, without the first ones."""
    took = [float(one["ms_per_step"]) for one in steps[WARMING:] if one.get("ms_per_step")]
    return statistics.median(took) if took and all(map(math.isfinite, took)) else None
