"""Made-up records of runs whose every second is known, as a launcher keeps them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from launcher.runs.records import record

CREATED = datetime.fromisoformat("2026-11-02T09:30:00+00:00")
OPTIONS: dict[str, Any] = {
    "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 512,
    "max_position_embeddings": 512, "vocab_size": 50257, "micro_batch_size": 16,
    "global_batch_size": 16, "train_iters": 1000, "bf16": True, "save": "/ck",
    "save_interval": 200, "eval_interval": 250, "eval_iters": 5, "log_interval": 50,
}  # fmt: skip
H100 = "NVIDIA H100 80GB HBM3"


@dataclass
class MadeUpRun:
    """A run of our program: seconds of what it does, by which its log is written.

    zone: hours by which its log's clock is ahead of UTC; seen: whether the launcher saw its GPUs,
    which a scheduler's aren't
    """

    run: str = "aaaa0001"
    options: dict[str, Any] = field(default_factory=dict)
    start: float = 20
    warm_up: float = 12
    ms: float = 1000
    save: float = 30
    evaluation: float = 5
    end: float = 40
    data_ms: float | None = None
    zone: float = 0
    gpus: int = 1
    day: int = 0
    links: dict[str, Any] = field(default_factory=dict)
    seen: bool = True
    lines: list[dict[str, Any]] = field(default_factory=list)
    endings: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.options = OPTIONS | self.options
        self.created = CREATED + timedelta(days=self.day)
        self.now = self.created + timedelta(seconds=self.start)

    def attempt(
        self, number: int, first: int, last: int, *, outcome: str = "finished", by: str = "itself"
    ) -> MadeUpRun:
        """Iterations from `first` on to `last`, and its end."""
        every = self.options["log_interval"]
        for iteration in range(first + every, last + 1, every):
            seconds = every * self.ms / 1000
            before = iteration - every
            seconds += self.warm_up * (before == first)
            if before > first and before % self.options["save_interval"] == 0:
                seconds += self.save
            if before > first and before % self.options["eval_interval"] == 0:
                seconds += self.evaluation
                self.lines.append(
                    {"kind": "validation", "attempt": number, "iteration": before}
                    | {"split": "validation", "loss": 3.0}
                )
            self.now += timedelta(seconds=seconds)
            told = self.now + timedelta(hours=self.zone)
            line = {
                "kind": "step", "attempt": number, "iteration": iteration,
                "train_iters": self.options["train_iters"],
                "ms_per_step": round(1000 * seconds / every, 1),
                "time": told.strftime("%Y-%m-%d %H:%M:%S"),
                "samples": iteration * self.options["global_batch_size"],
                "global_batch_size": self.options["global_batch_size"],
            }  # fmt: skip
            self.lines.append(line | ({} if self.data_ms is None else {"data_ms": self.data_ms}))
        self.now += timedelta(seconds=self.end)
        self.endings.append(
            {"attempt": number, "ended": self.now.isoformat(timespec="seconds"), "by": by}
            | {"outcome": outcome, "code": 0}
        )
        return self

    def keep(self, runs: Path) -> str:
        """Write it below the folder of the records; its id."""
        folder = runs / self.run
        folder.mkdir(parents=True)
        kept = record.Record(
            self.run,
            "gpt2",
            self.created.isoformat(),
            "docker",
            "/",
            "gpt2.yaml",
            {},
            (),
            self.gpus,
        )
        plan = {
            "program": "gpt", "options": self.options, "nodes": 1, "mounts": [], "labels": [],
            "processes_per_node": self.gpus, "gpus": {"count": self.gpus}, "env": {},
            "image": "megatron:24.10",
        }  # fmt: skip
        gpu = {"name": H100, "total": 85 * 10**9, "capability": [9, 0]}
        facts = {"machine": {"gpus": [gpu] * self.gpus} if self.seen else None}
        facts |= {"host": {"name": "a", "cpus": 2}, "links": self.links}
        for name, value in (
            (record.FILE, asdict(kept)), (record.PLAN, plan), (record.FACTS, facts)
        ):  # fmt: skip
            (folder / name).write_text(json.dumps(value))
        for name, lines in ((record.METRICS, self.lines), (record.ENDINGS, self.endings)):
            (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        return self.run
