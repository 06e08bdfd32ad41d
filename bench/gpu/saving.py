"""Times saving and loading of a checkpoint beside a copy of it: `python3 -m bench.gpu.saving`.

`--to FOLDER` is on the disk that is measured. GPT-2 124M trains in one process, by the fast path
unless `--no-fast` is given; before a plain Python's options `-m launcher.agent.cpu` it does so on
the CPU. A save is timed as training waits for it and as async_save has it wait, then the steps
beside the writer, the load, and a copy of the same bytes, flushed to the disk. `--profile` prints
what the host does in one more save. What is given after `--` is for the training program.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import os
import pstats
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from launcher.agent import compat, cpu
from launcher.trainer.gpt import arguments as command_line

SIZES = (
    "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 "
    "--vocab-size 50257 --micro-batch-size 16 --bf16 --train-iters 1000 --lr 1e-4 --mock-data "
    "--eval-iters 0 --log-interval 1000"
)
STEPS, TIMES = 12, 6


def timed(work: Callable[[], Any]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy(source: Path, to: Path) -> None:
    """Copy a folder's files, each flushed to the disk."""
    to.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, to / path.name)
        descriptor = os.open(to / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def measure(trainer: Any, batches: Any, profiled: bool) -> dict[str, float]:
    """Seconds of each, the median of some; `profiled` prints what one more save does."""
    import torch

    from launcher.trainer.gpt import distributed_checkpoint

    def steps(count: int = STEPS) -> list[float]:
        def step() -> None:
            trainer._iteration(batches)
            torch.cuda.synchronize()

        return [timed(step) for _ in range(count)]

    queue = (*compat.async_saving(), distributed_checkpoint.HostCopies())
    steps(2)
    gc.freeze()  # as `Trainer.run` does
    usual, found = median(steps()[STEPS // 2 :]), dict[str, list[float]]()
    for _ in range(TIMES):
        for name, beside in (("save", None), ("async", queue)):
            trainer.beside = beside
            found.setdefault(name, []).append(timed(trainer._save))
            folder = Path(trainer.arguments.save) / f"iter_{trainer.progress.iteration:07d}"
            beside_it = steps(1) if beside else []
            found.setdefault("first step", []).extend(beside_it)
            whole = timed(lambda: trainer._finish_saving(wait=True))
            found.setdefault("written after", []).extend([whole + beside_it[0]] if beside else [])
            steps(2)
    told = {name: median(each) for name, each in found.items()}
    told["first async"] = found["async"][0]  # which makes room for the copies
    told |= {f"async {number}": each for number, each in enumerate(found["async"])}
    told |= {f"step after {number}": each for number, each in enumerate(found["first step"])}
    told |= {"step": usual, "GB": sum(path.stat().st_size for path in folder.iterdir()) / 1e9}
    copies = [folder.with_name(f"copy-{number}") for number in range(TIMES)]
    told["copy"] = median(timed(partial(copy, folder, to)) for to in copies)
    known = distributed_checkpoint.common(folder)
    told["load"] = timed(
        lambda: distributed_checkpoint.load(folder, known, trainer.parts, trainer.optimizer)
    )
    if profiled:
        trainer.beside = queue
        with cProfile.Profile() as profile:
            trainer._save()
        trainer._finish_saving(wait=True)
        for order in ("cumulative", "tottime"):
            pstats.Stats(profile).sort_stats(order).print_stats(70)
    lost = told["async"] + told["first step"] - usual
    return told | {"lost of a save": lost / told["save"]}


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python3 -m bench.gpu.saving", description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("more", nargs="*")
    given = parser.parse_args()
    given.to.mkdir(parents=True)
    for name, value in {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0, "MASTER_PORT": 29651}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    compat.prepare()
    arguments = command_line.parse([*SIZES.split(), "--save", str(given.to), *given.more])
    arguments.on_cpu = cpu.is_installed()
    from launcher.trainer.gpt import samples, training
    from launcher.trainer.gpt.measurements import Meter

    trainer = training.begin(arguments, command_line.layout(arguments, 1))
    batches = iter(samples.loader(arguments, trainer.training_set, 0))
    trainer.report.meter = Meter()
    measured = measure(trainer, batches, given.profile)
    print(json.dumps({name: round(s, 4) for name, s in measured.items()}))


if __name__ == "__main__":
    main()
