"""Times GPT-2 through `launcher run`, ours beside upstream's: `python3 -m bench.gpu.through`.

`--source CHECKOUT` is a Megatron-LM for both. On one GPU it is the preset as it comes, and
upstream's pretrain_gpt.py as the user's script has it (fp16, micro-batch 1) and in bf16 by 16; with
`--gpus 2` both by TP=2, PP=2 and DP=2. `--tune PROGRAM` tunes that, the user's script where it is
upstream's. Files go to the folder of `--to`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from launcher.records import metrics

UPSTREAM = "pretrain_gpt.py"
SHORT = (
    "checkpoint.save=null checkpoint.load=null checkpoint.save_interval=null "
    "training.lr_warmup_fraction=null logging.eval_interval=1000000"
).split()
FUSIONS = ("masked_softmax", "gradient_accumulation")
BARE = ["model.transformer_impl=local", "megatron_args.no_persist_layer_norm=true"]
BARE += [f"megatron_args.no_{name}_fusion=true" for name in FUSIONS]
"""What pretrain_gpt.py does without for want of Transformer Engine and Apex."""

USERS = ["training.precision=fp16", "training.micro_batch_size=1"]
HALF = ["training.precision=bf16"]
TP = "parallel.tensor_model_parallel_size=2"
PP = ["parallel.pipeline_model_parallel_size=2", "training.micro_batch_size=4"]
DP = "training.global_batch_size=32"

Case = tuple[str, str, int, int, list[str]]
"""A name, a program, GPUs, steps, and keys."""

ONE: list[Case] = [
    ("ours, the preset as it comes", "gpt", 1, 240, []),
    ("upstream's, the user's: fp16 by 1", UPSTREAM, 1, 10, USERS),
    ("upstream's, bf16 by 16", UPSTREAM, 1, 50, HALF),
]
TWO: list[Case] = [
    ("ours, one GPU", "gpt", 1, 240, HALF),
    *(
        (f"{whose} {how}", program, 2, steps, [*HALF, *keys])
        for how, keys in (("TP=2", [TP]), ("PP=2", PP), ("DP=2, twice the batch", [DP]))
        for whose, program, steps in (("ours", "gpt", 100), ("upstream's", UPSTREAM, 50))
    ),
]


def words(program: str, gpus: int, source: Path, keys: list[str]) -> list[str]:
    """What `launcher run` is given, and `tune`."""
    keys = [f"program={program}", *(BARE if program == UPSTREAM else []), *keys]
    sets = [word for key in keys for word in ("--set", key)]
    return ["gpt2.yaml", "--backend", "local", "--gpus", str(gpus), "--source", str(source), *sets]


def run(case: Case, source: Path, folder: Path) -> dict[str, Any]:
    """ms a step (the median of the log's lines but the first), their range, seconds in all."""
    name, program, gpus, steps, keys = case
    every = max(1, steps // 10)
    keys = [*SHORT, *keys, f"training.train_iters={steps}", f"logging.log_interval={every}"]
    keys += ["logging.eval_iters=1"]
    began = time.monotonic()
    argv = [sys.executable, "-m", "launcher", "run", *words(program, gpus, source, keys)]
    ran = subprocess.run(argv, capture_output=True, text=True, errors="replace")
    log = folder / f"{''.join(c if c.isalnum() else '-' for c in name)}.log"
    log.write_text(ran.stdout + ran.stderr, encoding="utf-8")
    found = [each for line in ran.stdout.splitlines() for each in metrics.parse_all(line)]
    took = [each.ms_per_step for each in found if isinstance(each, metrics.Step)][2:]
    told = {"rc": ran.returncode, "s": round(time.monotonic() - began)}
    if not took:
        return told | {"last": ran.stderr[-600:]}
    return {"ms": median(took), "least": min(took), "most": max(took)} | told


def main() -> None:
    """Run what is asked for, one after the other, and print each as it ends."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu.through", description=__doc__)
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--tune", help="gpt or pretrain_gpt.py, in place of the runs")
    parser.add_argument("--minutes", default="2.5")
    given = parser.parse_args()
    given.to.mkdir(parents=True, exist_ok=True)
    source = given.source.resolve()
    if given.tune:
        keys = USERS if given.tune == UPSTREAM else []
        argv = words(given.tune, given.gpus, source, keys)
        argv += ["--any-precision"] * bool(keys) + ["--minutes", given.minutes]
        argv += ["-o", str(given.to / f"{given.tune.partition('.')[0]}-tuned.yaml")]
        sys.exit(subprocess.run([sys.executable, "-m", "launcher", "tune", *argv]).returncode)
    told = {}
    for case in ONE if given.gpus == 1 else TWO:
        told[case[0]] = run(case, source, given.to)
        print(f"{case[0]}: {told[case[0]]}", flush=True)
        text = json.dumps(told, indent=1)
        (given.to / f"through-{given.gpus}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
