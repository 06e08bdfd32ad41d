"""Measures settings by short runs, kept in the tune's folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

from launcher.agent import costs
from launcher.agent.words import COMPILED, COSTS
from launcher.runs.explain.failures import FailureSign, explain
from launcher.runs.follow import ask_image
from launcher.runs.follow.assemble import bare_plan
from launcher.runs.plan.job import Backend
from launcher.runs.records import metrics, record
from launcher.runs.runfile.config import RunConfig
from launcher.tools.tuning import rate
from launcher.tools.tuning.candidates import WORKERS, Setting, SettingChanges
from launcher.tools.tuning.search import Measurement, as_line, of_lines

LINES = 5
"""Of the log that a run has, about as many steps each; the first has the warming up in it."""

SLOW = 1.5
"""A run is ended where two lines after that are so many times the best one's."""

STEADY = 1.1
"""Two lines are alike where the greater is at most so many times the other."""

ENOUGH = 4.0
"""Seconds of steps after the first line, after which two lines alike at the end show
what it takes."""

NEVER = 10**9
SILENCE = 600
"""Seconds after which a run that writes nothing is ended."""

SPARE = 1.2
"""Of the seconds in which torch compiled, what another compilation should take: on an H100 one of
qwen3-0.6b was begun for which the first one's seconds were left, and showed nothing."""

FEW, SURE = 1.03, 1.0
"""Two lines that are so alike suffice after so many seconds."""

WARM_UP = 4
"""Steps of a process that compile, warm up and capture: as trainer/fast/fast.py's `slow_steps`."""

TRACED_AFTER = 3
"""Settings after which time is kept for the traced run: with fewer, another setting says more."""

LINE = 1.0
"""Seconds that a line should take at least: of slow steps, each has a line."""

OVER = "the time was over"
COMPILING = re.compile(rf"{COMPILED} in (\d+) s")

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

TellLine = Callable[[str], None]
"""Shows how far a measurement is."""


def lines_every(steps: int, ms: float | None) -> int:
    """Steps of a line of a run of so many, whose steps should take so long."""
    most = max(1, steps // LINES)
    return most if ms is None else min(most, max(1, round(LINE * 1000 / ms)))


def short(config: RunConfig, steps: int, every: int) -> dict[str, object]:
    """The keys that make a run of a few steps of it, which writes and evaluates nothing.

    `every`: steps of a line.
    """
    nothing = "checkpoint.save checkpoint.load checkpoint.save_interval checkpoint.keep "
    nothing += "logging.tensorboard_dir logging.wandb_project logging.check_replicas_interval"
    found: dict[str, object] = dict.fromkeys(nothing.split())
    found |= {"logging.log_interval": every, "logging.eval_interval": NEVER, "profile": None}
    found |= {"megatron_args.exit_interval": _end(steps, every), "max_restarts": 0}
    found |= {"watchdog.timeout": SILENCE, "watchdog.action": "end"}
    return found | {f"guard.on_{what}": "ignore" for what in ("nan", "spike", "flat")}


def _end(steps: int, every: int) -> int:
    """The last step: a line's, once all have warmed up."""
    return every * max(
        LINES, -(-max(steps, WARM_UP + 1) // every) if every > 1 else WARM_UP + LINES
    )


def rates(chosen: Backend, config: RunConfig, precision: str) -> Mapping[str, Any] | None:
    """What `rate.py` says of the card that the run is for; None where it says nothing."""
    text = Path(rate.__file__).read_text(encoding="utf-8")
    image = {key: value for key, value in config.image if value is not None}
    one = "0" if config.gpus == "0" else "1"
    argv = ["python3", "-c", text, precision]
    with suppress(ValueError, IndexError):
        said = ask_image.said(bare_plan(chosen, image, one, argv), chosen, RATE_SECONDS)
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
        given: SettingChanges,
        until: float,
        tell: TellLine,
    ) -> None:
        self.name, self.words, self.rest, self.given = name, words, rest, given
        self.until, self.tell = until, tell
        self.folder = record.make(name)
        known = of_lines(record.read_lines(self.folder / MEASUREMENTS))
        self.known = {found.setting: found for found in known}
        self.best: float | None = None
        self.first = True
        self.last, self.made = 0.0, 0  # seconds of the last run, and how many were measured
        self.compiling = 0.0  # the most of a run's seconds in which torch compiled
        self.compiled = set[tuple[tuple[str, object], ...]]()  # what of settings it has kept

    def __call__(self, setting: Setting) -> Measurement | None:
        """What the setting takes; None where there is no more time."""
        found = self.known.get(setting)
        if found is None:
            began, until = time.monotonic(), self.until
            until -= self.last if self.made >= TRACED_AFTER else 0.0
            if began + self._seconds(setting) > until:
                return None
            found = self._run(setting, until)
            if found.why.startswith(PORT):  # by another run, meanwhile
                found = self._run(setting, until)
            if found.why == OVER:
                return None
            self.last, self.made = time.monotonic() - began - self.spent, self.made + 1
            self.compiling = max(self.compiling, self.spent)
            self.compiled.add(_of_steps(setting))
            record.append(self.name, MEASUREMENTS, as_line(found))
            self.known[setting] = found
        if found.ms and not (self.best and self.best < found.ms):
            self.best = found.ms
        return found

    def _seconds(self, setting: Setting) -> float:
        """What a run should take: the last one's, and what torch compiles anew."""
        known = _of_steps(setting) in self.compiled
        return self.last + (0.0 if known else SPARE * self.compiling)

    def _run(
        self, setting: Setting, until: float, more: SettingChanges | None = None
    ) -> Measurement:
        """A run, ended once its log shows what a step takes, and at the latest `until` then."""
        argv, self.spent = self._argv(setting, more or {}), 0.0
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
            late = Timer(max(0.0, until - time.monotonic()), process.terminate)
            late.start()
            try:
                for line in _lines(process):
                    tail = [*tail[-300:], line]
                    if compiled := COMPILING.search(line):
                        self.spent = float(compiled[1])
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
            finally:
                late.cancel()
        self.first, over = False, time.monotonic() >= until
        took = [step.ms_per_step for step in settled(steps)]
        if took and (ended or over or process.returncode == 0):
            return Measurement(setting, min(took), max(mib, default=None))  # some compile late
        if over:
            return Measurement(setting, None, None, OVER)
        return Measurement(setting, None, None, *_why(tail, process.returncode))

    def _argv(self, setting: Setting, more: SettingChanges) -> list[str]:
        keys = {**self.given, **dict(setting.changes), **more}
        sets = [word for key, value in keys.items() for word in ("--set", _set(key, value))]
        argv = [sys.executable, "-m", "launcher", "run", *self.words, *sets, "--tie"]
        argv += [] if self.first else ["--no-preflight"]  # memory and rules were looked at
        return [*argv, *(["--", *self.rest] if self.rest else [])]

    def shares(self, setting: Setting) -> dict[str, float]:
        """What a setting's step goes to, the largest first; {} where a trace doesn't show it.

        Nor where no time is left for it.
        """
        if time.monotonic() + self.last / 2 > self.until:
            return {}
        every = self.given["logging.log_interval"]
        assert isinstance(every, int)
        first = max(2 * every, WARM_UP) + 1
        traced = {"steps": f"{first}-{first + 2}", "folder": str(self.folder / "profile")}
        self._run(setting, self.until, {"profile": traced})
        found = dict[str, float]()
        for told in record.read_lines(self.folder / "profile" / COSTS.format(0)):
            for cost in told.get("costs", ()):
                part = PARTS.get(cost["family"], TRAFFIC)
                found[part] = found.get(part, 0.0) + cost["share"]
        return dict(sorted(found.items(), key=lambda one: -one[1]))


def settled(steps: Sequence[metrics.TrainingStep]) -> list[metrics.TrainingStep]:
    """The lines but the first, and but those in which a process still compiles and warms up."""
    begins = [0, *(step.iteration for step in steps)]
    later = [step for step, begin in zip(steps, begins, strict=False) if begin >= WARM_UP]
    return later if later and later[0] is not steps[0] else later[1:]


def is_slow(steps: Sequence[metrics.TrainingStep], best: float | None) -> bool:
    """Whether none of two lines after warming up comes near the best setting's ms."""
    later = [step.ms_per_step for step in settled(steps)]
    return best is not None and len(later) > 1 and min(later) > SLOW * best


def has_told(steps: Sequence[metrics.TrainingStep]) -> bool:
    """Whether the last two lines are alike, and took long enough for how alike they are."""
    later = settled(steps)
    if len(later) < 2:
        return False
    least, most = sorted(step.ms_per_step for step in later[-2:])
    ends = [step.iteration for step in steps]
    counts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    seconds = sum(
        step.ms_per_step * count / 1000
        for step, count in zip(later, counts[-len(later) :], strict=True)
    )
    return (most <= FEW * least and seconds > SURE) or (most <= STEADY * least and seconds > ENOUGH)


def _of_steps(setting: Setting) -> tuple[tuple[str, object], ...]:
    """What bears on what torch compiles."""
    return tuple(change for change in setting.changes if change[0] != WORKERS)


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
    """Why a run took nothing: the known cause, or the launcher's last line; and a cure."""
    found = explain([line.encode() for line in tail])
    said = [line.strip() for line in tail if line.startswith(("gpt: ", "launcher: "))]
    known = [_cause(sign) for sign in found.signs[:1]]
    known = known or [line for line in said if line.startswith("gpt: ")][-1:]
    suspects = [one.text for one in found.suspects[:1]]
    why = (known or suspects or said[-1:] or [f"it ended with {code}"])[0]
    return why, found.signs[0].failure.remedy if found.signs else ""
