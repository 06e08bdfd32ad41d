"""Keeps a run's output as it arrives: the whole log, and its metrics by line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from launcher.agent import words
from launcher.base import files
from launcher.base.logfile import GAP, LogFile
from launcher.runs.records import metrics, record, throughput
from launcher.runs.records.metrics import Found, TrainingStep
from launcher.runs.records.record import APPEND, METRICS
from launcher.runs.records.throughput import Rates

MOST_LINKS = 4
"""Rates of all-reduces that an attempt writes to its facts."""

LONGEST_LINE = 1 << 16
"""Bytes of a line that hasn't ended yet, after which it is no line of metrics."""

MARKS = (b"iteration", b"padded vocab", b"all-reduce of")
"""What every line that is read has one of; most of a log has none, and is passed over."""


class Speed:
    """Computes how fast a step was, from the plan's sizes and the vocabulary in the log."""

    def __init__(self, plan: dict[str, Any] | None, facts: dict[str, Any] | None) -> None:
        self.plan, self.gpu = plan, _gpu(facts)
        self.step = throughput.step_of(plan) if plan else None

    def read_vocabulary(self, line: str) -> None:
        """Take the padded vocabulary from the line that has it."""
        if self.plan and (size := metrics.padded_vocabulary(line)):
            self.step = throughput.step_of(self.plan, size)

    def rates_of(self, step: TrainingStep) -> Rates | None:
        """The rates of a step; None where the model isn't known."""
        if self.step is None:
            return None
        batch = step.global_batch_size or self.step.batch
        return throughput.rates(replace(self.step, batch=batch), step.ms_per_step, self.gpu)


def _gpu(facts: dict[str, Any] | None) -> str | None:
    """The name of the machine's GPUs, where they have one name."""
    machine = facts and facts["machine"]
    names = {gpu["name"] for gpu in machine["gpus"] or ()} if machine else set()
    return names.pop() if len(names) == 1 else None


class RecordWatch:
    """Keeps one attempt of a run in the folder of its record, from the attempt's first byte on.

    What was kept of the attempt before goes when that comes: an engine may have no log to give.
    `seen` is called with each metric. What can't be written is reported once, by `tell`; the run
    goes on, and what comes when there is room again is kept.
    """

    def __init__(
        self,
        folder: Path,
        attempt: int,
        *,
        speed: Speed | None = None,
        seen: Callable[[Found, Rates | None], None] = lambda found, rates: None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.speed = speed
        self.seen = seen
        self.tell = tell
        self.folder, self.metrics = folder, folder / METRICS
        self.log = folder / record.log_name(attempt)
        self.attempt = attempt
        self.opened = self.told = False
        self.links = 0
        self.files: dict[Path, LogFile] = {}
        self.begun = {False: b"", True: b""}
        for path in (self.log, self.metrics):
            with suppress(OSError):  # a run without a word has them, too
                os.close(files.open_own(path, APPEND))

    def __enter__(self) -> RecordWatch:
        return self

    def __exit__(self, *_: object) -> None:
        for is_error, line in self.begun.items():
            self.begun[is_error] = b""
            self._read(line)
        self._close()

    def add(self, data: bytes, is_error: bool) -> None:
        """Keep a piece of output, and read the lines that end in it."""
        if not self.opened:
            self._open()
        self._write(self.log, data)
        whole, newline, begun = data.rpartition(b"\n")
        if newline:
            self._read(self.begun[is_error] + whole)
            self.begun[is_error] = begun
        else:
            self.begun[is_error] = (self.begun[is_error] + data)[-LONGEST_LINE:]

    def _open(self) -> None:
        self.opened = True
        for path, more, gap in ((self.log, os.O_TRUNC, GAP), (self.metrics, 0, "\n")):
            try:
                if path == self.metrics:
                    _forget(path, self.attempt)
                self.files[path] = LogFile(files.open_own(path, APPEND | more), gap)
            except OSError as error:
                self._lost(path, error)

    def _read(self, text: bytes) -> None:
        """Read whole lines; most of a log is passed over in one look."""
        if not any(mark in text for mark in MARKS):
            return
        for line in text.decode(errors="replace").split("\n"):
            if self.speed:
                self.speed.read_vocabulary(line)
            if self.links < MOST_LINKS and (link := words.LINK.search(line)):
                self._keep_link(*link.groups())
            for found in metrics.parse_all(line):
                self._keep(found)

    def _keep_link(self, nodes: str, each: str, gpu: str, rate: str) -> None:
        """Add to the facts how fast ranks sum, within a machine or between machines."""
        path, reach = self.folder / record.FACTS, "between" if int(nodes) > 1 else "within"
        self.links += 1
        if facts := record.read_file(path):
            link = {"nodes": int(nodes), "ranks": int(each), "gpu": gpu, "gb_s": float(rate)}
            facts["links"] = {**facts.get("links", {}), reach: link}
            with suppress(OSError):
                files.write(path, f"{json.dumps(facts, indent=1)}\n", 0o600)

    def _keep(self, found: Found) -> None:
        rates = (
            self.speed.rates_of(found) if self.speed and isinstance(found, TrainingStep) else None
        )
        self.seen(found, rates)
        kept = json.dumps(metrics.as_record(found, self.attempt, rates))
        self._write(self.metrics, f"{kept}\n".encode())

    def _write(self, path: Path, data: bytes) -> None:
        if file := self.files.get(path):
            file.write(data)
            if file.error:
                self._lost(path, file.error)

    def _lost(self, path: Path, error: OSError) -> None:
        if not self.told:
            self.tell(f"the log can't be written: {path}: {error.strerror}; the run goes on")
        self.told = True

    def _close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):
                os.close(file.handle)
        self.files.clear()


def _forget(path: Path, attempt: int) -> None:
    """Leave out of the metrics what was kept of an attempt that is now read from its beginning."""
    lines = record.read_lines(path)
    kept = [json.dumps(one) + "\n" for one in lines if one.get("attempt") not in (attempt, None)]
    files.write(path, "".join(kept), 0o600)
