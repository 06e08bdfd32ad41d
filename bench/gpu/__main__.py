"""Times GPT-2's step on one GPU and says what it goes to: `python3 -m bench.gpu --to FOLDER`.

It needs a Python with torch for the GPU and Megatron-Core, such as an image's, and runs the
training program as `launcher run` does: eager, and the fast path with and without dropout, one
after the other. `steps.json` and, where matplotlib is there, `steps.png` are written to the folder;
`--draw FOLDER` makes the figure of a `steps.json` that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RUNNER = "-m launcher.train.runner --processes-per-node 1 --grace 60 --profile"
MODEL = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --bf16 "
    "--max-position-embeddings 512 --init-method-std 0.006 --make-vocab-size-divisible-by 128 "
    "--micro-batch-size 16 --global-batch-size 16 --lr 1e-4 --min-lr 1e-5 --weight-decay 0.1 "
    "--lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --mock-data "
    "--split 949,50,1 --vocab-size 50257 --eval-interval 1000 --eval-iters 1 --log-interval 20"
)
"""GPT-2 124M, 8192 tokens a step."""

STEPS, TRACED = 240, (205, 214)
UNTRACED = 10
"""Lines of the log before the traced steps."""

VARIANTS = {
    "eager": "--no-fast",
    "fast": "",
    "fast, no dropout": "--hidden-dropout 0 --attention-dropout 0",
}
ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
WAITED = re.compile(r"compiled the step in (\d+) s")
PEAK = re.compile(r"max allocated: ([\d.]+)")


def measure(options: str, folder: Path) -> dict[str, Any]:
    """Of a run: ms a step (median of its log's lines), s of compiling, peak MB, shares of costs."""
    folder.mkdir(parents=True)
    first, last = TRACED
    traced = f"--train-iters {STEPS} --profile-steps {first} {last} --profile-dir"
    program = f"-- -m launcher.train.gpt {MODEL} {options} {traced}"
    argv = [sys.executable, *RUNNER.split(), str(folder), *program.split(), str(folder)]
    ran = subprocess.run(argv, capture_output=True, text=True)
    (folder / "log").write_text(ran.stdout + ran.stderr, encoding="utf-8")
    if ran.returncode:
        sys.exit(f"{ran.stderr[-2000:]}\nrc {ran.returncode}; {folder / 'log'} has all of it")
    steps = [float(ms) for ms in ELAPSED.findall(ran.stdout)][1:UNTRACED]
    waited, peak = WAITED.search(ran.stdout), PEAK.search(ran.stdout)
    costs = json.loads((folder / "rank-0.costs.json").read_text(encoding="utf-8"))
    return {
        "ms": statistics.median(steps),
        "least": min(steps),
        "most": max(steps),
        "compiled_s": int(waited[1]) if waited else 0,
        "peak_mb": float(peak[1]) if peak else None,
        "shares": {cost["family"]: cost["share"] for cost in costs["costs"]},
    }


def draw(folder: Path) -> None:
    """The figure: a bar for each run, as long as its step, divided as the trace is."""
    from matplotlib.figure import Figure

    told = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    families = list(dict.fromkeys(name for run in told["runs"].values() for name in run["shares"]))
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes = figure.subplots()
    left = dict.fromkeys(told["runs"], 0.0)
    for place, family in enumerate(families):
        ms = [run["ms"] * run["shares"].get(family, 0) for run in told["runs"].values()]
        axes.barh(list(left), ms, left=list(left.values()), label=family, color=f"C{place}",
                  hatch="//" if place >= 10 else None)  # fmt: skip
        left = {name: left[name] + each for name, each in zip(left, ms, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel(
        f"ms a step; GPT-2 124M, 8192 tokens, bf16, {told['gpu']}, torch {told['torch']}"
    )
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(folder / "steps.png", dpi=110)


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", type=Path, help="a folder that isn't there yet")
    where.add_argument("--draw", type=Path, help="a folder with steps.json")
    given = parser.parse_args()
    if given.draw:
        return draw(given.draw)
    import torch

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    told = {"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__, "runs": {}}
    given.to.mkdir(parents=True)
    for number, (name, options) in enumerate(VARIANTS.items()):
        os.environ["MASTER_PORT"] = str(29600 + number)  # the last one's may not be free yet
        run = told["runs"][name] = measure(
            options, given.to / name.replace(", ", "-").replace(" ", "-")
        )
        print(f"{name}: {run['ms']} ms ({run['least']} to {run['most']})", run, flush=True)
    (given.to / "steps.json").write_text(f"{json.dumps(told, indent=1)}\n", encoding="utf-8")
    return draw(given.to) if find_spec("matplotlib") else None


if __name__ == "__main__":
    main()
