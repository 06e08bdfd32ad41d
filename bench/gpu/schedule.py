"""Runs a list of jobs on this machine's GPUs: `python3 -m bench.gpu.schedule LIST --to FOLDER`.

LIST is a YAML file of jobs, such as jobs.yaml beside this module. A job has its GPUs to itself,
and a limit of seconds; one that fails doesn't keep others from starting, and none is started that
would outlast `--seconds`. results.json and logs.txt in the folder of `--to` are written as each job
ends. `--only A,B` takes groups or names of jobs, `--forecast CARD` predicts them and runs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from launcher.runs.records import metrics

HERE = Path(__file__).resolve().parent
ROOT = str(HERE.parents[1])
"""For PYTHONPATH: a job starts in a folder of its own."""

UPSTREAM, TRAINER = "pretrain_gpt.py", "launcher.trainer.gpt"
MARK = "SCHEDULED_JOB"
"""A variable of all processes of a job: its name."""

GRACE = 15.0
"""Seconds that a job has to stop before it is killed."""

WARM = 4
"""Lines of the log that don't count: torch compiles, warms up and captures."""

COMPILED = re.compile(r"compiled the step in (\d+) s")
SHOWN = re.compile(r"launcher:|runner:|fast:|Error|forecast|memory |^routed:|GB/s")


@dataclass(frozen=True)
class Job:
    """A run file's name and its keys, and what is done with it; or `argv`, Python's arguments.

    `group`: a word by which it is chosen; `after`: jobs that have to end well before; `tune`:
    minutes of `launcher tune` in place of `run`; `more`: options for the program, which is then
    started without the launcher's checks; `program`: a module that stands for the trainer's, as
    bench.gpu.held does; `signal`: a signal's name, the iteration `at` which it
    is sent, and the rank. {work}, {text} and {upstream} in words
    are paths, {job} is the name.
    """

    name: str
    group: str = ""
    gpus: int = 1
    seconds: int = 120
    run: str = ""
    steps: int = 0
    every: int = 1
    set: list[Any] = field(default_factory=list)
    argv: str = ""
    more: str = ""
    program: str = ""
    after: list[str] = field(default_factory=list)
    tune: int = 0
    signal: dict[str, Any] = field(default_factory=dict)

    def keys(self) -> list[str]:
        """KEY=VALUE of the run file; lists in `set` are flattened."""
        steps = [f"training.train_iters={self.steps}", f"logging.log_interval={self.every}"]
        return [*flat(self.set), *(steps if self.steps else [])]

    def words(self, verb: str, cpu: bool) -> list[str]:
        """Of `launcher VERB`, to the end of the run file's keys."""
        beside = HERE / self.run
        where = ["--gpus", str(self.gpus)]
        if cpu:
            where = ["--gpus", "0", *(["--processes", str(self.gpus)] if verb == "run" else [])]
        sets = [word for key in self.keys() for word in ("--set", key)]
        given = str(beside) if beside.is_file() else f"{self.run}.yaml"
        if verb != "forecast" and f"program={UPSTREAM}" in self.keys():
            where += ["--source", "{upstream}"]
        return [verb, given, "--backend", "local", *where, *sets]


def flat(given: Iterable[Any]) -> Iterator[str]:
    """The words of nested lists."""
    for each in given:
        if isinstance(each, str):
            yield each
        else:
            yield from flat(each)


@dataclass
class Running:
    """A job on its GPUs."""

    job: Job
    cards: list[str]
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    signalled: float = 0.0
    late: bool = False

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


def processes(name: str) -> list[int]:
    """All of a job, the first one first."""
    found = dict[int, int]()
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if f"{MARK}={name}".encode() in (each / "environ").read_bytes().split(b"\0"):
                found[int(each.name)] = int(
                    (each / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return sorted(found)


def rank_process(name: str, rank: int) -> int:
    """The first process of a job that is that rank; its loader's workers came later."""
    for process in processes(name):
        with suppress(OSError):
            if f"RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(
                b"\0"
            ):
                return process
    return 0


def found_in(text: str, job: Job, began: float, ended: float) -> dict[str, Any]:
    """What a job's output says: ms a step, memory in MiB, losses by iterations."""
    found = [each for line in text.splitlines() for each in metrics.parse_all(line)]
    steps = [each for each in found if isinstance(each, metrics.TrainingStep)]
    memory = [each for each in found if isinstance(each, metrics.MemoryUse)]
    told: dict[str, Any] = {"s": round(ended - began)}
    if compiled := COMPILED.search(text):
        told["compiled_s"] = int(compiled[1])
    if took := [each.ms_per_step for each in steps[min(WARM, len(steps) // 2) :]]:
        told |= {"ms": median(took), "least": min(took), "most": max(took)}
    if memory:
        told["mib"] = max(each.max_allocated_mib or 0 for each in memory)
        told["reserved"] = max(each.max_reserved_mib or each.reserved_mib or 0 for each in memory)
    told["losses"] = {each.iteration: each.loss for each in steps if each.loss}
    told["norms"] = {each.iteration: each.grad_norm for each in steps[-5:]}
    if held := [each.loss for each in found if isinstance(each, metrics.Validation)]:
        told["validation"] = held[-1]
    shown = [line for line in text.splitlines() if SHOWN.search(line)]
    told["lines"] = [line[:300] for line in shown[:4] + shown[4:][-8:]]
    return told


class Schedule:
    """Jobs in their order of importance, and the GPUs that are free."""

    def __init__(
        self, jobs: Sequence[Job], cards: Sequence[str], to: Path, values: dict[str, str], cpu: bool
    ) -> None:
        """`values`: what {work}, {text} and {upstream} stand for."""
        self.waiting, self.free, self.to, self.cpu = list(jobs), list(cards), to, cpu
        self.running: list[Running] = []
        self.results: dict[str, dict[str, Any]] = {}
        self.values = values
        self.began = time.monotonic()

    def run(self, seconds: float) -> None:
        """Until all have ended or none may start any more."""
        until = self.began + seconds
        while self.running or self.waiting:
            self._start(until)
            if not self.running:
                break
            time.sleep(0.2)
            for each in [*self.running]:
                self._look(each, until)
        for job in self.waiting:
            self._keep(job, {"rc": None, "why": "no time, too few GPUs, or one before it failed"})

    def _start(self, until: float) -> None:
        for job in [*self.waiting]:
            before = [self.results.get(name, {}).get("rc") == 0 for name in job.after]
            fits = len(self.free) >= job.gpus and time.monotonic() + job.seconds <= until
            if fits and all(before):
                self.waiting.remove(job)
                self._begin(job)

    def command(self, job: Job, cards: list[str]) -> list[str]:
        """What starts it."""
        values = self.values | {"job": job.name}
        if job.argv:
            words = ["-m", *shlex.split(filled(job.argv, values))]
        elif job.tune:
            words = ["-m", "launcher", *job.words("tune", self.cpu), "--minutes", str(job.tune)]
            words += ["-o", "{work}/{job}/tuned.yaml"]
        else:
            words = ["-m", "launcher", *job.words("run", self.cpu)]
        words = [filled(word, values) for word in words]
        argv = [sys.executable, *words]
        if not (job.more or job.program):
            return argv
        given: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
        shown = subprocess.run([*argv, "--dry-run"], env=self._env(job, cards), **given).stdout
        line = next(line for line in shown.splitlines() if line.startswith("env "))
        if job.program:
            line = line.replace(f"-m {TRAINER} ", f"-m {job.program} ")
        return [*shlex.split(line), *shlex.split(job.more)]

    def _env(self, job: Job, cards: list[str]) -> dict[str, str]:
        own = {MARK: job.name, "LAUNCHER_RUNS": f"{self.values['work']}/{job.name}/runs"}
        own["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
        return os.environ | own | {"CUDA_VISIBLE_DEVICES": ",".join(cards)}

    def _begin(self, job: Job) -> None:
        cards, self.free = self.free[: job.gpus], self.free[job.gpus :]
        folder = Path(self.values["work"]) / job.name
        folder.mkdir(parents=True)
        log = folder / "log"
        try:
            argv = self.command(job, cards)
        except (subprocess.CalledProcessError, StopIteration) as error:
            self.free += cards
            said = getattr(error, "stderr", "") or repr(error)
            return self._keep(job, {"rc": 1, "why": said[-600:]})
        with log.open("wb") as into:
            process = subprocess.Popen(
                argv, cwd=folder, env=self._env(job, cards), stdout=into, stderr=into,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self.running.append(Running(job, cards, process, log, time.monotonic()))
        print(
            f"[{time.monotonic() - self.began:4.0f} s] {job.name} on {','.join(cards)}", flush=True
        )

    def _look(self, one: Running, until: float) -> None:
        """Send what signal is due, stop it where it is late, and keep its results once it ended."""
        now, job = time.monotonic(), one.job
        if job.signal and not one.signalled:
            steps = [x for line in one.text().splitlines() for x in metrics.parse_all(line)]
            if any((x.iteration or 0) >= job.signal["at"] for x in steps):
                self._send(one)
        if one.process.poll() is None:
            over = now - one.began - min(job.seconds, until - one.began)
            if over > GRACE:
                self._kill(one)
            elif over > 0 and not one.late:
                one.late = True
                one.process.terminate()
            return
        self._kill(one)
        self.running.remove(one)
        self.free = sorted(self.free + one.cards)
        text = one.text()
        told = {"rc": one.process.returncode, "gpus": ",".join(one.cards), "late": one.late}
        told |= found_in(text, job, one.began, now)
        if one.signalled:
            told["s_from_signal"] = round(now - one.signalled, 1)
        if told["rc"]:
            told["tail"] = text[-3000:]
        elif not told["losses"]:
            told["last"] = text[-1500:]
        self._keep(job, told, text)

    def _send(self, one: Running) -> None:
        job = one.job
        if process := rank_process(job.name, job.signal["rank"]):
            os.kill(process, signal.Signals[job.signal["name"]])
            one.signalled = time.monotonic()

    def _kill(self, one: Running) -> None:
        for process in processes(one.job.name):
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)

    def _keep(self, job: Job, told: dict[str, Any], text: str = "") -> None:
        self.results[job.name] = told
        (self.to / "results.json").write_text(json.dumps(self.results, indent=1) + "\n")
        with (self.to / "logs.txt").open("a", encoding="utf-8") as into:
            into.write(f"\n===== {job.name}\n{text[-200_000:]}")
        losses = list(told.get("losses", {}).values())
        fell = f" loss {losses[0]} -> {losses[-1]}" if losses else ""
        some = {name: told[name] for name in SUMMARY if told.get(name) is not None}
        self._say(f"{job.name}: {some}{fell}")
        if last := told.get("tail") or told.get("last"):
            print("    | " + last[-700:].replace("\n", "\n    | "), flush=True)

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)


SUMMARY = "rc why late s compiled_s ms least most mib reserved s_from_signal".split()


def filled(word: str, values: dict[str, str]) -> str:
    """With what {names} in it stand for."""
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def forecasts(jobs: Sequence[Job], card: str, values: dict[str, str]) -> None:
    """Print each job's memory and time as `launcher forecast` has it."""
    for job in jobs:
        if not job.run or job.tune:
            continue
        words = [filled(word, values) for word in job.words("forecast", cpu=False)]
        argv = [sys.executable, "-m", "launcher", *words, "--gpu", card, "--json"]
        ran = subprocess.run(argv, capture_output=True, text=True)
        if ran.returncode:
            print(f"{job.name}: {ran.stderr[-300:]}")
            continue
        said = json.loads(ran.stdout)
        gib = (said["memory"]["total"] - said["memory"]["overhead"]) / 2**30
        step, tokens = said["step_ms"] or {}, said["tokens_per_s"] or {}
        print(
            f"{job.name}: {gib:.1f} GiB, {step.get('value', 0):.0f} ms "
            f"({step.get('least', 0):.0f} to {step.get('most', 0):.0f}), "
            f"{tokens.get('value', 0):.0f} tokens/s",
            flush=True,
        )


def load(path: Path, only: Sequence[str]) -> list[Job]:
    """The jobs of a list, all or those of the named groups, in its order."""
    jobs = [Job(**each) for each in yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]]
    return [job for job in jobs if not only or job.group in only or job.name in only]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu.schedule", description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("--to", type=Path, default=Path("scheduled"))
    parser.add_argument("--work", type=Path, help="for checkpoints, logs and records")
    parser.add_argument("--text", default="", help="a .bin and .idx, without these")
    parser.add_argument("--source", default="", help="a Megatron-LM for pretrain_gpt.py")
    parser.add_argument("--gpus", default="0", help="their numbers: 0,1,2,3")
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--forecast", metavar="CARD")
    given = parser.parse_args()
    jobs = load(given.list, [word for word in given.only.split(",") if word])
    values = {
        "work": str((given.work or given.to / "work").resolve()),
        "text": given.text and os.path.abspath(given.text),
        "upstream": given.source and os.path.abspath(given.source),
    }
    if given.forecast:
        return forecasts(jobs, given.forecast, values)
    for job in jobs:
        if (there := Path(values["work"], job.name)).exists():
            parser.error(f"{there} is of an earlier time: give another --to or --work")
    given.to.mkdir(parents=True, exist_ok=True)
    made = Schedule(jobs, given.gpus.split(","), given.to.resolve(), values, given.cpu)
    made.run(given.seconds)
    return None


if __name__ == "__main__":
    main()
