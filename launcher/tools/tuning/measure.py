"""Measures settings by short runs, kept in the tune's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.agent import costs
from launcher.agent.traces import COSTS
from launcher.runs.explain.failures import FailureSign, explain
from launcher.runs.follow import ask
from launcher.runs.follow.assemble import bare_plan
from launcher.runs.plan.job import Backend
from launcher.runs.records import metrics, record
from launcher.runs.runfile.config import RunConfig
from launcher.tools.tuning.search import Measurement, as_line, of_lines
from launcher.tools.tuning.settings import Changes, Setting
from launcher.trainer import rate

LINES = 5
"""Of the log that a run has, about as many steps each; the first has the warming up in it."""

SLOW = 1.5
"""A run is ended where two lines after that are so many times the best one's."""

STEADY = 1.1
"""Two lines are alike where the greater is at most so many times the other."""

ENOUGH = 4.0
"""Seconds of steps after the first line, after which a run whose last two lines are alike has told
what it takes."""

NEVER = 10**9
SILENCE = 600
"""Seconds after which a run that writes nothing is ended."""

RESERVED = 2
"""Runs, as long as the last one, that fit in before the end: one more, and the traced one."""

MEASUREMENTS = "measured.jsonl"
RATE_SECONDS = 120

PARTS = {
    costs.WAITING: "the host",
    costs.PYTHON: "the host",
    costs.COMMUNICATION: "communication",
    "matrix products": "arithmetic",
    "attention": "arithmetic",
}
"""What holds a step back, by the family of a cost; the others move memory."""

TRAFFIC = "memory traffic"
LONGEST_QUOTE = 100
PORT = "the port is taken"
"""As the table of known failures calls it."""

Tell = Callable[[str], None]
"""Shows how far a measurement is."""


def short(config: RunConfig, steps: int) -> dict[str, object]:
    """The keys that make a run of a few steps of it, which writes and evaluates nothing."""
    every = max(1, steps // LINES)
    nothing = "checkpoint.save checkpoint.load checkpoint.save_interval checkpoint.keep "
    nothing += "logging.tensorboard_dir logging.wandb_project logging.check_replicas_interval"
    found: dict[str, object] = dict.fromkeys(nothing.split())
    found |= {"logging.log_interval": every, "logging.eval_interval": NEVER, "profile": None}
    found |= {"megatron_args.exit_interval": every * LINES, "max_restarts": 0}
    found |= {"watchdog.timeout": SILENCE, "watchdog.action": "end"}
    return found | {f"guard.on_{what}": "ignore" for what in ("nan", "spike", "flat")}


def rates(chosen: Backend, config: RunConfig, precision: str) -> Mapping[str, Any] | None:
    """What `train/rate.py` says of the card that the run is for; None where it says nothing."""
    text = Path(rate.__file__).read_text(encoding="utf-8")
    image = {key: value for key, value in config.image if value is not None}
    one = "0" if config.gpus == "0" else "1"
    argv = ["python3", "-c", text, precision]
    with suppress(ValueError, IndexError):
        said = ask.said(bare_plan(chosen, image, one, argv), chosen, RATE_SECONDS)
        found = json.loads(said.strip().splitlines()[-1])
        return found if isinstance(found, dict) else None
    return None


class Runs:
    """Runs settings, or knows what they took: lines of JSON in the folder of a tune.

    `words` are what `launcher run` is given for the run as it is, `given` the keys that stand for
    its `auto`, `until` is the end by time.monotonic().
    """

    def __init__(
        self,
        name: str,
        words: Sequence[str],
        rest: Sequence[str],
        given: Changes,
        until: float,
        tell: Tell,
    ) -> None:
        self.name, self.words, self.rest, self.given = name, words, rest, given
        self.until, self.tell = until, tell
        self.folder = record.make(name)
        known = of_lines(record.read_lines(self.folder / MEASUREMENTS))
        self.known = {found.setting: found for found in known}
        self.best: float | None = None
        self.first = True
        self.last = 0.0  # seconds

    def __call__(self, setting: Setting) -> Measurement | None:
        """What the setting takes; None where there is no more time."""
        found = self.known.get(setting)
        if found is None:
            began = time.monotonic()
            if began + RESERVED * self.last > self.until:
                return None
            found = self._run(setting)
            if found.why.startswith(PORT):  # by another run, meanwhile
                found = self._run(setting)
            self.last = time.monotonic() - began
            record.append(self.name, MEASUREMENTS, as_line(found))
            self.known[setting] = found
        if found.ms and not (self.best and self.best < found.ms):
            self.best = found.ms
        return found

    def _run(self, setting: Setting, more: Changes | None = None) -> Measurement:
        argv = self._argv(setting, more or {})
        steps, mib, tail, ended = list[metrics.TrainingStep](), list[float](), list[str](), False
        began = time.monotonic()
        with subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"LAUNCHER_RUNS": str(self.folder / "runs")},
        ) as process:
            try:
                for line in _lines(process):
                    tail = [*tail[-300:], line]
                    for found in metrics.parse_all(line):
                        steps += [found] if isinstance(found, metrics.TrainingStep) else []
                        if isinstance(found, metrics.MemoryUse):
                            mib += [found.max_reserved_mib or found.reserved_mib or 0]
                    at = f"step {steps[-1].iteration}" if steps else "starting"
                    self.tell(f"{setting}: {at}, {time.monotonic() - began:.0f} s")
                    if not (ended or more) and (is_slow(steps, self.best) or has_told(steps)):
                        process.terminate()
                        ended = True
            except BaseException:
                process.terminate()
                raise
        self.first = False
        took = [step.ms_per_step for step in steps[1:]]
        if took and (ended or process.returncode == 0):
            return Measurement(setting, min(took), max(mib, default=None))  # some compile late
        return Measurement(setting, None, None, *_why(tail, process.returncode))

    def _argv(self, setting: Setting, more: Changes) -> list[str]:
        keys = {**self.given, **dict(setting.changes), **more}
        sets = [word for key, value in keys.items() for word in ("--set", _set(key, value))]
        argv = [sys.executable, "-m", "launcher", "run", *self.words, *sets, "--tie"]
        argv += [] if self.first else ["--no-preflight"]  # memory and rules were looked at
        return [*argv, *(["--", *self.rest] if self.rest else [])]

    def shares(self, setting: Setting, steps: int) -> dict[str, float]:
        """What a setting's step goes to, the largest first; {} where a trace can't tell."""
        first = 2 * max(1, steps // LINES) + 1
        traced = {"steps": f"{first}-{first + 2}", "folder": str(self.folder / "profile")}
        self._run(setting, {"profile": traced})
        found = dict[str, float]()
        for told in record.read_lines(self.folder / "profile" / COSTS.format(0)):
            for cost in told.get("costs", ()):
                part = PARTS.get(cost["family"], TRAFFIC)
                found[part] = found.get(part, 0.0) + cost["share"]
        return dict(sorted(found.items(), key=lambda one: -one[1]))


def is_slow(steps: Sequence[metrics.TrainingStep], best: float | None) -> bool:
    """Whether none of two lines after the first comes near the best setting's ms."""
    if not best or len(steps) <= 2:
        return False
    return min(step.ms_per_step for step in steps[1:]) > SLOW * best


def has_told(steps: Sequence[metrics.TrainingStep]) -> bool:
    """Whether the lines after the first took long enough, and the last two are alike."""
    if len(steps) <= 2:
        return False
    ends = [step.iteration for step in steps]
    least, most = sorted(step.ms_per_step for step in steps[-2:])
    lasted = zip(steps[1:], ends, ends[1:], strict=False)
    seconds = sum(step.ms_per_step * (end - start) for step, start, end in lasted) / 1000
    return most <= STEADY * least and seconds > ENOUGH


def _set(key: str, value: object) -> str:
    return f"{key}={json.dumps(value)}"


def _lines(process: subprocess.Popen[str]) -> Iterator[str]:
    assert process.stdout
    return iter(process.stdout.readline, "")


def _cause(sign: FailureSign) -> str:
    """A known failure, with the line that shows it where the name doesn't say it all."""
    name = sign.failure.name
    if sign.said is None or name.startswith(("GPU memory", PORT)):
        return name
    return f"{name}: {sign.said.text[:LONGEST_QUOTE]}"


def _why(tail: Sequence[str], code: int) -> tuple[str, str]:
    """Why a run took nothing: the known cause, or what the launcher said last; and a cure."""
    found = explain([line.encode() for line in tail])
    said = [line.strip() for line in tail if line.startswith(("gpt: ", "launcher: "))]
    known = [_cause(sign) for sign in found.signs[:1]]
    known = known or [line for line in said if line.startswith("gpt: ")][-1:]
    suspects = [one.text for one in found.suspects[:1]]
    why = (known or suspects or said[-1:] or [f"it ended with {code}"])[0]
    return why, found.signs[0].failure.cure if found.signs else ""
