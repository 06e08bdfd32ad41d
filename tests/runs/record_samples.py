"""Made-up records, as a launcher keeps them, with texts in them that would like to be more."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.runs.records import record

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u202e&amp;"
"""A name that would like to be a part of the page, and to be read backwards."""

OPTIONS = {
    "num_layers": 12,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "seq_length": 1024,
    "max_position_embeddings": 1024,
    "vocab_size": 50257,
    "tensor_model_parallel_size": 2,
}


def keep(runs: Path, run: str, name: str = "gpt2", day: int = 1, **more: Any) -> Path:
    """A record, written as a launcher writes it.

    steps: lines of metrics; world: GPUs; line: the run that its line began with; ended: an outcome;
    ending: more of how it ended.
    """
    folder, created = runs / run, f"2026-11-{day:02d}T09:30:00+00:00"
    folder.mkdir(parents=True)
    kept = record.Record(run, name, created, "docker", "/home/a", "gpt2.yaml", {}, (), 8)
    plan = {
        "program": "gpt",
        "options": OPTIONS | more.get("options", {}),
        "nodes": 1,
        "processes_per_node": more.get("world", 8),
        "gpus": {"count": more.get("world", 8)},
        "labels": [["megatron-launchpad.line", more.get("line", run)]],
        "mounts": [],
    }
    facts = {"image": {"name": "megatron-launchpad:24.10"}}
    for file, value in ((record.FILE, vars(kept)), (record.PLAN, plan), (record.FACTS, facts)):
        (folder / file).write_text(f"{json.dumps(value, indent=1)}\n")
    (folder / record.LOG).write_text("a log\n")
    (folder / record.METRICS).write_text("".join(f"{json.dumps(one)}\n" for one in more["steps"]))
    if outcome := more.get("ended"):
        told = {"attempt": 0, "ended": created.replace("T09", "T11"), "outcome": outcome, "code": 0}
        told |= {"cause": "itself", "by": "itself", "reason": "", "checkpoint": None}
        told |= {"iteration": None, **more.get("ending", {})}
        (folder / record.ENDINGS).write_text(f"{json.dumps(told)}\n")
    return folder


def steps(numbers: Iterable[int], *, attempt: int = 0, level: float = 2.5) -> list[dict[str, Any]]:
    """Lines of metrics of a loss that falls to about `level`."""
    chance = random.Random(f"{level} {attempt}")  # noqa: S311 - no secret
    found = list[dict[str, Any]]()
    for number in numbers:
        loss = level + 8 / math.sqrt(1 + number / 4) + chance.gauss(0, 0.08)
        ms = chance.gauss(210, 6)
        found.append(
            {
                "kind": "step",
                "attempt": attempt,
                "iteration": number,
                "train_iters": 2000,
                "ms_per_step": round(ms, 1),
                "samples": number * 64,
                "learning_rate": 3e-4 * (1 - number / 2500),
                "global_batch_size": 64,
                "loss": round(loss, 6),
                "grad_norm": round(chance.uniform(0.4, 1.1), 3),
                "tokens_per_s": 64 * 1024 * 1000 / ms,
            }
        )
        if number % 200 == 0:
            found.append(
                {"kind": "validation", "attempt": attempt, "iteration": number}
                | {"split": "validation", "loss": round(loss + 0.1, 6)}
            )
    return found


def several(runs: Path) -> None:
    """Runs of all kinds: a line that was resumed twice, failures, one without metrics."""
    ending: dict[str, Any] = {"code": 137, "reason": "rank 3 was killed by SIGKILL"}
    ending["clues"] = [
        "cause: out of GPU memory: CUDA out of memory",
        "cure: a smaller micro-batch",
    ]
    ending["checkpoint"] = "/data/ckpt/iter_0000600"
    more: dict[str, Any] = {"ended": "failed", "ending": ending}
    keep(runs, "aaaa0001", "gpt2-long", 2, steps=steps(range(5, 805, 5)), **more)
    more = {"line": "aaaa0001", "steps": steps(range(605, 1405, 5), level=2.4)}
    keep(runs, "aaaa0002", "gpt2-long", 3, ended="stopped", ending={"by": "launcher stop"}, **more)
    alarm = {"kind": "alarm", "attempt": 0, "iteration": 1700, "alarm": "spike", "text": "rose"}
    more = {"line": "aaaa0001", "world": 4, "steps": [*steps(range(1405, 2005, 5)), alarm]}
    keep(runs, "aaaa0003", "gpt2-long", 4, ended="finished", **more)
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "swiglu": True}
    sizes |= {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2}
    more = {"options": sizes, "steps": steps(range(10, 1500, 10), level=1.9)}
    keep(runs, "bbbb0001", "llama3-8b", 5, world=64, **more)
    ending = {"code": 1, "reason": HOSTILE, "clues": [f"most like one: {HOSTILE}"]}
    keep(runs, "cccc0001", HOSTILE, 6, steps=[], ended="failed", ending=ending)
    keep(runs, "dddd0001", "mixtral", 7, steps=steps(range(2, 300, 2), level=3.1), ended="finished")
