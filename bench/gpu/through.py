"""Times training through `launcher run`, ours beside upstream's: `python3 -m bench.gpu.through`.

`--source CHECKOUT` is a Megatron-LM for both. On one GPU it is GPT-2's preset as it comes, by
torchrun too, and upstream's pretrain_gpt.py as the user's script has it (fp16, micro-batch 1), in
bf16 by 16 and as tuned; with `--gpus 2` both by TP=2, PP=2 and DP=2; with `--gpus 4` ours by the
presets for eight GPUs and by DP=4; with `--long` llama3.2-1b at
sequence 4096, as a share of what matrix products alone reach. `--only WORD` takes the cases with
that in their names. `--tune PROGRAM` tunes that, the user's script where it is upstream's. Files go
to the folder of `--to`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.__main__ import products
from launcher.runs.plan import layout, model_size
from launcher.runs.plan.render import values_of
from launcher.runs.records import metrics
from launcher.runs.runfile import origins

UPSTREAM = "pretrain_gpt.py"
SHORT = (
    "checkpoint.save=null checkpoint.load=null checkpoint.save_interval=null "
    "training.lr_warmup_fraction=null training.lr_warmup_iters=null logging.eval_iters=1"
).split()
FUSIONS = ("masked_softmax", "gradient_accumulation", "rope")
BARE = ["model.transformer_impl=local", "megatron_args.no_persist_layer_norm=true"]
BARE += [f"megatron_args.no_{name}_fusion=true" for name in FUSIONS]
"""What pretrain_gpt.py does without for want of Transformer Engine and Apex."""

HALF = ("training.precision=bf16",)
NO_DROPOUT = ("model.hidden_dropout=0.0", "model.attention_dropout=0.0")
USERS = ("training.precision=fp16", "training.micro_batch_size=1")
TUNED = ("training.precision=fp16", "data.num_workers=4")
TUNED += ("megatron_args.cross_entropy_loss_fusion=true",)
"""What `launcher tune` found for upstream's on an H100; the micro-batch is the preset's."""

LONG = (
    "model.seq_length=4096 model.max_position_embeddings=4096 training.global_batch_size=4"
).split()
EVALUATES = ("logging.eval_interval=50", "logging.eval_iters=5")
LINES = 24
"""Of the log."""


@dataclass(frozen=True)
class Case:
    """A run: its steps, its keys besides the preset's, and whether torchrun starts it."""

    name: str
    program: str = "gpt"
    gpus: int = 1
    steps: int = 240
    keys: tuple[str, ...] = ()
    preset: str = "gpt2"
    bare: bool = False

    def words(self, checkout: Path, *more: str) -> list[str]:
        """What `launcher run` is given, and `tune`."""
        keys = [f"program={self.program}", *(BARE if self.program == UPSTREAM else []), *self.keys]
        sets = [word for key in (*keys, *more) for word in ("--set", key)]
        where = ["--backend", "local", "--gpus", str(self.gpus), "--source", str(checkout)]
        return [f"{self.preset}.yaml", *where, *sets]

    @property
    def operations(self) -> float:
        """Of a step on each GPU, as `ModelShape.operations` counts them."""
        sets = [f"program={self.program}", f"gpus={self.gpus}", *self.keys]
        config, _ = origins.load(self.preset, [origins.parse_set(each) for each in sets])
        where = layout.layout(config, self.gpus)
        size = model_size.shape(config.program, values_of(config, where))
        assert size
        assert config.training.global_batch_size
        return size.operations(config.training.global_batch_size) / self.gpus


ONE = [
    Case("ours, the preset as it comes", keys=EVALUATES),
    Case("ours, by torchrun", keys=EVALUATES, bare=True),
    Case("ours, no dropout", keys=NO_DROPOUT),
    Case("upstream's, the user's, fp16 by 1", UPSTREAM, steps=12, keys=USERS),
    Case("upstream's, bf16 by 16", UPSTREAM, steps=48, keys=HALF),
    Case("upstream's, as tuned", UPSTREAM, steps=96, keys=TUNED),
]
TWO = [Case("ours, one GPU", keys=HALF)]
for how, keys in {
    "DP=2, twice the batch": ("training.global_batch_size=32",),
    "DP=2, twice the batch, distributed optimizer": (
        *("training.global_batch_size=32", "parallel.use_distributed_optimizer=true"),
    ),
    "TP=2": ("parallel.tensor_model_parallel_size=2",),
    "PP=2": ("parallel.pipeline_model_parallel_size=2", "training.micro_batch_size=4"),
}.items():
    TWO += [Case(f"ours {how}", gpus=2, keys=HALF + keys)]
    TWO += [Case(f"upstream's {how}", UPSTREAM, gpus=2, steps=48, keys=HALF + keys)]
FOUR = ("training.micro_batch_size=4",)
BY_ONE = ("training.micro_batch_size=1", "megatron_args.recompute_activations=true")
LLAMA = [
    Case("ours, long", steps=48, keys=(*LONG, *FOUR), preset="llama3.2-1b"),
    Case("upstream's, long", UPSTREAM, steps=24, keys=(*LONG, *BY_ONE), preset="llama3.2-1b"),
]

WHOLE = "parallel.tensor_model_parallel_size=1", "parallel.sequence_parallel=false"
SHARED = "training.micro_batch_size=1", "parallel.use_distributed_optimizer=true"
EXPERTS = (
    *WHOLE,
    *SHARED,
    "parallel.expert_model_parallel_size=4",
    "training.global_batch_size=16",
)
LLAMA_8B = (*SHARED, "training.global_batch_size=8")
MANY = [
    Case("ours, llama3-8b TP=4", gpus=4, steps=14, keys=LLAMA_8B, preset="llama3-8b"),
    Case(
        *("ours, mixtral-8x7b by 6 layers EP=4", "gpt", 4, 14),
        *((*EXPERTS, "model.num_layers=6"), "mixtral-8x7b"),
    ),
    Case(
        *("ours, qwen3-30b-a3b by 12 layers EP=4", "gpt", 4, 14),
        *((*EXPERTS, "model.num_layers=12"), "qwen3-30b-a3b"),
    ),
    Case("ours, one GPU", steps=120, keys=HALF),
    Case("ours DP=4", gpus=4, steps=120, keys=(*HALF, "training.global_batch_size=64")),
]
"""The presets for eight GPUs on four: a smaller batch, and of experts' models fewer layers."""


def command(case: Case, words: Sequence[str]) -> list[str]:
    """What starts a case: `launcher run`, or torchrun with what that would have started."""
    argv = [sys.executable, "-m", "launcher", "run", *words]
    if not case.bare:
        return argv
    said = subprocess.run([*argv, "--dry-run"], capture_output=True, text=True, check=True)
    program = shlex.split(said.stdout.strip().splitlines()[-1].partition(" -- -m launcher")[2])
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(case.gpus)]
    return [sys.executable, "-m", *torchrun, "-m", f"launcher{program[0]}", *program[1:]]


def run(case: Case, checkout: Path, folder: Path) -> dict[str, Any]:
    """ms a step (the median of the log's lines but the first two), their range, seconds in all."""
    every = max(1, case.steps // LINES)
    steps = [f"training.train_iters={case.steps}", f"logging.log_interval={every}"]
    seldom = ["logging.eval_interval=1000000"] * (EVALUATES[0] not in case.keys)
    argv = command(case, replace(case, keys=(*SHORT, *case.keys)).words(checkout, *steps, *seldom))
    began = time.monotonic()
    ran = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    told: dict[str, Any] = {"rc": ran.returncode, "s": round(time.monotonic() - began)}
    log = folder / f"{''.join(c if c.isalnum() else '-' for c in case.name)}.log"
    log.write_text(ran.stdout + ran.stderr, encoding="utf-8")
    found = [each for line in ran.stdout.splitlines() for each in metrics.parse_all(line)]
    lines = [each for each in found if isinstance(each, metrics.TrainingStep)][2:]
    memory = [each.max_allocated_mib or 0 for each in found if isinstance(each, metrics.MemoryUse)]
    if not lines:
        return told | {"last": ran.stderr[-600:]}
    took = [each.ms_per_step for each in lines]
    ms = median(took)
    told |= {"ms": ms, "least": min(took), "most": max(took), "mib": max(memory, default=None)}
    if not seldom:  # the line after an evaluation has it in its time
        after = [each for each in lines if each.iteration % 50 == every]
        told["evaluations_ms"] = [round(every * (each.ms_per_step - ms)) for each in after]
    return told


def main() -> None:
    """Run what is asked for, one after the other, and print each as it ends."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu.through", description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--tune", help="gpt or pretrain_gpt.py, in place of the runs")
    parser.add_argument("--minutes", default="5")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    checkout = given.source.resolve()
    if given.tune:
        keys = USERS if given.tune == UPSTREAM else ()
        argv = Case("", given.tune, given.gpus, keys=keys).words(checkout)
        argv += ["--any-precision"] * bool(keys) + ["--minutes", given.minutes]
        argv += ["-o", str(given.to / f"{given.tune.partition('.')[0]}-tuned.yaml")]
        sys.exit(subprocess.run([sys.executable, "-m", "launcher", "tune", *argv]).returncode)
    kind = "long" if given.long else str(given.gpus)
    most, told = products(), dict[str, Any]()
    print(f"matrix products {most:.0f} TFLOP/s", flush=True)
    for case in LLAMA if given.long else {1: ONE, 2: TWO, 4: MANY}[given.gpus]:
        if given.only not in case.name:
            continue
        took = told[case.name] = run(case, checkout, given.to)
        if "ms" in took:
            took["of_products"] = round(case.operations / took["ms"] / 1e9 / most, 3)
        print(f"{case.name}: {took}", flush=True)
        text = json.dumps({"products_tflops": most} | told, indent=1)
        (given.to / f"through-{kind}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
