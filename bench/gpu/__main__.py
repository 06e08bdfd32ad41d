"""Times GPT-2's step on one GPU and says what it goes to: `python3 -m bench.gpu --to FOLDER`.

It needs a Python with torch for the GPU and Megatron-Core, such as an image's, and runs the
training program as `launcher run` does: eager, and the fast path with and without dropout, one
after the other. `--upstream CHECKOUT` runs Megatron's own pretrain_gpt.py beside them, as it is
started by hand.
`steps.json` and, where matplotlib is there, `steps.png` are written to the folder; `--draw FOLDER`
makes the figure of a `steps.json` that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launcher.tools.tuning import rate

RUNNER = "-m launcher.agent.runner --processes-per-node 1 --grace 60"
OURS = "-m launcher.trainer.gpt"
SAME = (
    "--init-method-std 0.006 --make-vocab-size-divisible-by 128 --lr 1e-4 --min-lr 1e-5 "
    "--weight-decay 0.1 --lr-decay-style cosine --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 "
    "--mock-data --split 949,50,1 --eval-interval 1000 --eval-iters 1"
)
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0"

UPSTREAM = (
    "--tokenizer-type NullTokenizer --transformer-impl local --no-persist-layer-norm "
    "--no-masked-softmax-fusion --no-gradient-accumulation-fusion"
)
"""What pretrain_gpt.py can do without TransformerEngine and Apex."""


@dataclass(frozen=True)
class Case:
    """A model, its batch in samples a step, and the programs' options by the name of a run."""

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    batch: int
    steps: int
    ours: dict[str, str]
    upstream: dict[str, str]

    @property
    def options(self) -> str:
        return (
            f"--num-layers {self.layers} --hidden-size {self.hidden} --num-attention-heads "
            f"{self.heads} --seq-length {self.sequence} --max-position-embeddings {self.sequence} "
            f"--global-batch-size {self.batch} {SAME}"
        )

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence

    @property
    def operations(self) -> float:
        """Of a step, forward and backward: Narayanan et al. 2021, equation 3 without recompute."""
        relative = 1 + self.sequence / 6 / self.hidden
        relative += self.vocabulary / 12 / self.layers / self.hidden
        return 72 * self.tokens * self.layers * self.hidden**2 * relative


GPT2 = Case(
    "GPT-2 124M", 12, 768, 12, 512, 50257, 16, 240,
    {
        "eager": "--bf16 --micro-batch-size 16 --no-fast",
        "fast": "--bf16 --micro-batch-size 16",
        "fast, no dropout": f"--bf16 --micro-batch-size 16 {NO_DROPOUT}",
    },
    {
        "upstream, fp16 by 1": "--fp16 --micro-batch-size 1",
        "upstream, bf16 by 16": "--bf16 --micro-batch-size 16",
    },
)  # fmt: skip

TRACED = 10
"""Steps of ours, shortly before the last."""

LINES = 12
"""Of the log, about as many steps each; the first is left out, and what comes after the tenth."""

ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
WAITED = re.compile(r"compiled the step in (\d+) s")
PEAK = re.compile(r"max allocated: ([\d.]+)")


def run(program: str, folder: Path) -> dict[str, Any]:
    """ms a step of a program (median of its log's lines), s of compiling, and peak MB."""
    argv = [sys.executable, *f"{RUNNER} {program}".split()]
    ran = subprocess.run(argv, capture_output=True, text=True)
    (folder / "log").write_text(ran.stdout + ran.stderr, encoding="utf-8")
    if ran.returncode:
        sys.exit(f"{ran.stderr[-2000:]}\nrc {ran.returncode}; {folder / 'log'} has all of it")
    steps = [float(ms) for ms in ELAPSED.findall(ran.stdout)][1 : LINES - 2]
    waited, peak = WAITED.search(ran.stdout), PEAK.search(ran.stdout)
    return {
        "ms": statistics.median(steps),
        "least": min(steps),
        "most": max(steps),
        "compiled_s": int(waited[1]) if waited else 0,
        "peak_mb": float(peak[1]) if peak else None,
        "shares": {},
    }


def ours(case: Case, options: str, folder: Path) -> dict[str, Any]:
    """Of our program also what a step goes to: the shares of its costs."""
    last, every = case.steps - 2 * case.steps // LINES, case.steps // LINES
    profile = f"--profile-steps {last - TRACED + 1} {last} --profile-dir {folder}"
    words = f"{case.options} --vocab-size {case.vocabulary} --log-interval {every} {options}"
    told = run(f"--profile {folder} -- {OURS} {words} --train-iters {case.steps} {profile}", folder)
    costs = json.loads((folder / "rank-0.costs.json").read_text(encoding="utf-8"))
    return told | {"shares": {cost["family"]: cost["share"] for cost in costs["costs"]}}


def upstreams(case: Case, options: str, folder: Path, checkout: Path) -> dict[str, Any]:
    """Of Megatron's program, which counts the end of a document to the vocabulary by itself."""
    words = f"{case.options} --vocab-size {case.vocabulary - 1} --log-interval 5 {options}"
    program = f"{checkout / 'pretrain_gpt.py'} {words} {UPSTREAM} --train-iters {5 * LINES}"
    return run(f"-- {program}", folder)


def products() -> float:
    """TFLOP/s of products of matrices of 8192 by 8192 in bf16."""
    argv = [sys.executable, rate.__file__, "bf16"]
    said = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return float(json.loads(said)["tflops"])


def draw(folder: Path) -> None:
    """The figure: a bar for each run, as long as its step, divided as the trace is."""
    from matplotlib.figure import Figure

    told = json.loads((folder / "steps.json").read_text(encoding="utf-8"))
    told["runs"] = {name: run for name, run in told["runs"].items() if run["shares"]}
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
    where = f"{told['gpu']}, torch {told['torch']}"
    axes.set_xlabel(f"ms a step; {told['model']}, {told['tokens']} tokens, bf16, {where}")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(folder / "steps.png", dpi=110)


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--to", type=Path, help="a folder that isn't there yet")
    where.add_argument("--draw", type=Path, help="a folder with steps.json")
    parser.add_argument("--upstream", type=Path, help="a checkout of Megatron-LM")
    given = parser.parse_args()
    if given.draw:
        return draw(given.draw)
    import torch

    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    case, runs = GPT2, dict[str, Any]()
    gpu, rate = torch.cuda.get_device_name(0), round(products())
    told = {"gpu": gpu, "torch": torch.__version__, "model": case.name, "tokens": case.tokens}
    print(f"{gpu}: matrix products {rate} TFLOP/s", flush=True)
    given.to.mkdir(parents=True)
    for number, (name, options) in enumerate((case.ours | case.upstream).items()):
        os.environ["MASTER_PORT"] = str(29600 + number)  # the last one's may not be free yet
        folder = given.to / re.sub(r"\W+", "-", name)
        if name in case.ours:
            folder.mkdir()
            runs[name] = ours(case, options, folder)
        elif given.upstream:
            folder.mkdir()
            runs[name] = upstreams(case, options, folder, given.upstream.absolute())
        else:
            continue
        ms = runs[name]["ms"]
        share = case.operations / ms / 1e9 / rate
        print(f"{name}: {ms} ms, {share:.1%} of the products' rate", runs[name], flush=True)
    told |= {"products_tflops": rate, "runs": runs}
    (given.to / "steps.json").write_text(f"{json.dumps(told, indent=1)}\n", encoding="utf-8")
    return draw(given.to) if find_spec("matplotlib") else None


if __name__ == "__main__":
    main()
