"""Trains in an image by the launcher's own command, and checks the result."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import owned
from launcher.base.errors import LauncherError
from launcher.base.settings import ROOT, settings
from launcher.runs.plan.image_facts import ImageFacts, reference
from launcher.runs.runfile.config import ImageRequest
from launcher.runs.runfile.values import Gpus, parse_gpus
from launcher.tools.trials import quickstart_reload
from launcher.tools.trials.image_probe import Fact

if TYPE_CHECKING:
    from launcher.runs.plan.job import Backend

QUICKSTART = "examples/run_simple_mcore_train_loop.py"
SHOWN_LINES = 12
"""How many of a failed run's last lines are kept."""

LEAVE_WITHIN = 30
"""Seconds that a run which took too long has for ending, asked twice."""

LONGEST = 2_000_000
"""Seconds that can be waited for at most: poll counts milliseconds in 31 bits."""

WARNING = re.compile(r"\b(\w*Warning): (\S.*)")
NUMBER = re.compile(r"0x[0-9a-f]+|\d+")
RANK = re.compile(r"^\[rank\d+\]: ")
EXCEPTION = re.compile(r"(\[rank\d+\]: )?[A-Za-z_][\w.]*(Error|Exception|Exit): \S")
"""A traceback's last line, with the rank that torchrun puts before it."""

TRAIN, CHECKPOINT = "train", "checkpoint"
"""The stages of a trial: training, and saving or loading what was trained."""

SAVING = re.compile(
    r"can't save to|in save(_checkpoint)?$"
    r"|(dist_checkpointing|distributed/checkpoint)/.*, line \d+, in (?!<module>)"
)
"""A line of a failed save or load; an import of what saves, and its warnings, are none."""


class TrialError(LauncherError):
    """A trial didn't show what it is there to show; `tail` are the run's last lines."""

    exit_code = 1

    def __init__(self, problem: str, tail: Iterable[str] = (), stage: str = TRAIN) -> None:
        super().__init__(problem)
        self.tail = tuple(tail)
        self.stage = CHECKPOINT if any(SAVING.search(line) for line in self.tail) else stage


@dataclass(frozen=True)
class TrialRun:
    """A run that ended well: its lines, and the records of its metrics.jsonl."""

    lines: tuple[str, ...]
    metrics: tuple[Mapping[str, Any], ...]

    def has_to_say(self, text: str, otherwise: str) -> None:
        """Raise TrialError(otherwise), at CHECKPOINT, where no line has `text`."""
        if not any(text in line for line in self.lines):
            raise TrialError(otherwise, self.lines[-SHOWN_LINES:], CHECKPOINT)


@dataclass(frozen=True)
class TrialPlace:
    """Where trials run: a folder of their own, an image as a run file names it, GPUs (0: the CPU).

    `processes` are as many as trials start at most; `seconds` is how long a run may take; `devices`
    are the GPUs where they were named; `source` is a Megatron-LM checkout to run in place of the
    image's own; `fused` is whether Transformer Engine and Apex are there, without which upstream's
    programs want other options.
    """

    folder: Path
    image: Mapping[str, Any]
    gpus: int
    processes: int
    seconds: float
    devices: tuple[str, ...] = ()
    backend: str = "docker"
    source: Path | None = None
    fused: bool = True

    def run(
        self, name: str, config: Mapping[str, Any], processes: int, stage: str = TRAIN
    ) -> TrialRun:
        """Run `config` by `launcher run`, on the CPU or as many GPUs. Raises TrialError."""
        given: dict[str, Any] = {"name": name, "image": dict(self.image)}
        if self.gpus:
            given["gpus"] = str(Gpus(processes, self.devices[:processes]))
        else:
            given |= {"gpus": 0, "processes": processes}
        given |= {"source": str(self.source)} if self.source else {}
        file = self.folder / f"{name}.yaml"
        told = {**given, "resources": {"stop_grace": 10}, **config}
        file.write_text(json.dumps(told), encoding="utf-8")  # JSON is YAML
        records = self.folder / "runs" / name
        command = [sys.executable, "-m", "launcher", "run", file.name, "--backend", self.backend]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | {"LAUNCHER_RUNS": str(records), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            try:
                printed, _ = process.communicate(timeout=min(self.seconds, LONGEST))
            except subprocess.TimeoutExpired:
                tail = end(process).splitlines()[-SHOWN_LINES:]
                raise TrialError(f"{name}: longer than {self.seconds:g} s", tail) from None
            except BaseException:
                end(process)
                raise
        lines = tuple(printed.splitlines())
        if process.returncode:
            raise failure(f"{name}: exit code {process.returncode}", lines, stage)
        kept = (one.read_text(encoding="utf-8") for one in records.glob("*/metrics.jsonl"))
        return TrialRun(lines, tuple(map(json.loads, "".join(kept).splitlines())))


def end(process: subprocess.Popen[str]) -> str:
    """End a launcher and its run; what it printed."""
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=LEAVE_WITHIN)[0]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.communicate()[0]


def failure(problem: str, lines: Sequence[str], stage: str = TRAIN) -> TrialError:
    """The error of a run that printed `lines`: up to the exception that ended it, where one did.

    After that, other ranks and NCCL report at length that a peer is gone.
    """
    at = max((n for n, line in enumerate(lines) if EXCEPTION.match(line)), default=None)
    if at is None:
        return TrialError(problem, lines[-SHOWN_LINES:], stage)
    told = RANK.sub("", lines[at])
    return TrialError(f"{problem}: {told}", lines[: at + 1][-SHOWN_LINES:], stage)


MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}


def _config(iterations: int, tensor: int, **more: Any) -> dict[str, Any]:
    """A tiny GPT on made-up data."""
    training = {"micro_batch_size": 4, "global_batch_size": 8, "train_iters": iterations}
    return {
        "model": MODEL,
        "training": training | {"lr": 1e-2, "seed": 1234},
        "parallel": {"tensor_model_parallel_size": tensor},
        "data": {"mock": True, "vocab_size": 256},
        "logging": {"log_interval": 5, "eval_interval": 20, "eval_iters": 2},
        **more,
    }


def entrypoint(at: TrialPlace) -> list[TrialRun]:
    """Our program learns, saves split over all processes, and goes on in one."""
    saved = {"save": "entrypoint", "load": "entrypoint", "save_interval": 40}
    learns = at.run("entrypoint", _config(40, at.processes, checkpoint=saved), at.processes)
    losses = [one["loss"] for one in learns.metrics if one["kind"] == "validation"]
    if len(losses) < 2 or not losses[-1] < losses[0]:
        raise TrialError(f"entrypoint: the held-out loss doesn't fall: {losses}")
    goes_on = at.run("entrypoint-on", _config(50, 1, checkpoint=saved), 1, CHECKPOINT)
    goes_on.has_to_say("going on after iteration 40", "entrypoint-on: the checkpoint wasn't loaded")
    return [learns, goes_on]


def quickstart(at: TrialPlace) -> list[TrialRun]:
    """Upstream's quickstart trains five steps, saves and loads at TP=2, and TP=1 loads that."""
    workdir = {"resources": {"workdir": "quickstart", "stop_grace": 10}}
    (at.folder / "quickstart").mkdir(exist_ok=True)
    trains = at.run("quickstart", {"program": QUICKSTART, **workdir}, 2)
    trains.has_to_say("Successfully loaded the model", "quickstart: it loaded nothing")
    script = at.folder / "quickstart_reload.py"
    script.write_text(Path(quickstart_reload.__file__).read_text(encoding="utf-8"), "utf-8")
    reloads = at.run("quickstart-on", {"program": f"./{script.name}", **workdir}, 1, CHECKPOINT)
    reloads.has_to_say("reloaded at TP=1", "quickstart-on: TP=1 loaded nothing")
    return [trains, reloads]


UNFUSED = (
    *("no_gradient_accumulation_fusion", "no_persist_layer_norm", "no_masked_softmax_fusion"),
    *("no_bias_gelu_fusion", "no_bias_dropout_fusion"),
)
"""Options of pretrain_gpt.py without which it wants Apex or Transformer Engine."""

MOCK_VOCABULARY = 8192
"""Upstream's made-up documents count up to 4096 (MockGPTLowLevelDataset, before 0.16)."""


def pretrain_gpt(at: TrialPlace) -> list[TrialRun]:
    """Upstream's pretrain_gpt.py runs ten steps on made-up data."""
    given = _config(10, at.processes, program="pretrain_gpt.py")
    given["data"] = {"mock": True, "vocab_size": MOCK_VOCABULARY}
    if not (at.gpus and at.fused):
        given["model"] = MODEL | {"transformer_impl": "local"}
        given["megatron_args"] = dict.fromkeys(UNFUSED, True)
    if not at.gpus:
        given["training"] |= {"clip_grad": 0.0}  # else it wants gradients on a GPU
        given["megatron_args"]["use_cpu_initialization"] = True
    ran = at.run("pretrain-gpt", given, at.processes)
    if not any(one["kind"] == "step" and one["iteration"] == 10 for one in ran.metrics):
        raise TrialError("pretrain-gpt: the tenth step wasn't logged", ran.lines[-SHOWN_LINES:])
    return [ran]


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial: a state, why it isn't better, and the warnings, each once.

    stage: where it failed, TRAIN or CHECKPOINT
    """

    state: str
    reason: str = ""
    tail: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    stage: str = ""

    def __str__(self) -> str:
        return f"{self.state}: {self.reason}" if self.reason else self.state

    @property
    def failed(self) -> bool:
        return self.state == FAILS


RUNS, WARNS, FAILS, SKIPPED = "runs", "runs with warnings", "fails", "skipped"


def attempts(
    chosen: Backend,
    image: Mapping[str, Any],
    gpus: str,
    seconds: float,
    found: Mapping[str, Fact],
    source: Path | None = None,
) -> dict[str, TrialResult]:
    """Put an image to all trials, in a folder that is gone afterwards; what came of each, by name.

    gpus: as `--gpus` takes them; seconds: for each run; found: the image's facts; source: as in
    Place. Raises UsageError for other `gpus`.
    """
    held = chosen.facts(reference(ImageRequest(**image)))
    fused = all(name in found and found[name].value for name in ("transformer_engine", "apex"))
    wanted = parse_gpus(gpus)
    count = (chosen.count_gpus() or 0) if wanted.count is None else wanted.count
    with owned.scratch(settings().cache) as folder:
        at = TrialPlace(
            Path(folder),
            image,
            count,
            processes=min(count or 2, 2),
            seconds=seconds,
            devices=wanted.devices,
            backend=chosen.name,
            source=source,
            fused=fused,
        )
        return {name: attempt(name, at, held) for name in TRIALS}


def attempt(name: str, at: TrialPlace, held: ImageFacts | None) -> TrialResult:
    """Carry a trial out, where the image, which holds `held`, has what it takes."""
    if at.source is None and (held is None or not held.release):
        return TrialResult(SKIPPED, "the image has no Megatron of ours")
    if at.source is None and name in UPSTREAMS and not (held and held.scripts):
        return TrialResult(SKIPPED, "the image is made from an sdist, which has no scripts")
    if name == "quickstart" and at.processes < 2:
        return TrialResult(SKIPPED, "it takes two GPUs")
    try:
        told = warnings(TRIALS[name](at))
    except TrialError as error:
        return TrialResult(FAILS, error.problem, error.tail, stage=error.stage)
    return TrialResult(WARNS if told else RUNS, warnings=tuple(told))


TRIALS: Mapping[str, Callable[[TrialPlace], list[TrialRun]]] = {
    "entrypoint": entrypoint,
    "quickstart": quickstart,
    "pretrain_gpt": pretrain_gpt,
}
UPSTREAMS = ("quickstart", "pretrain_gpt")
"""The trials of scripts that an image made from an sdist doesn't have."""


def warnings(runs: Iterable[TrialRun]) -> list[str]:
    """The warnings that runs printed, each once whatever numbers stand in it, in their order."""
    found: dict[str, str] = {}
    for ran in runs:
        for line in ran.lines:
            if told := WARNING.search(line):
                found.setdefault(NUMBER.sub("#", told[0]), told[0].strip())
    return [*found.values()]
