"""What is kept of a run's output as it comes: the log, whole, and its metrics line by line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from launcher import files
from launcher.records import metrics
from launcher.records.metrics import Found, Step
from launcher.records.record import APPEND, LOG, METRICS
from launcher.records.throughput import Rates

LONGEST_LINE = 1 << 16
"""Bytes of a line that hasn't ended yet, after which it is no line of metrics."""

MARKS = (b"iteration", b"padded vocab")
"""What every line that is read has one of; most of a log has none, and is passed over."""


class Speed(Protocol):
    """Makes rates of steps, by what the log says of the model."""

    def read(self, line: str) -> None:
        """Take what a line says of the model."""

    def of(self, step: Step) -> Rates | None:
        """The rates of a step, where they can be told."""


class Watch:
    """Keeps one attempt of a run in the folder of its record, from the attempt's first byte on.

    What was kept of the attempt before goes when that comes: an engine may have no log to give.
    `seen` is called with each metric. A folder that can't be written to is told of once, by
    `tell`, and the run goes on.
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
        self.folder = folder
        self.attempt = attempt
        self.opened = False
        self.files: tuple[int, int] | None = None
        self.begun = {False: b"", True: b""}
        for name in (log_name(attempt), METRICS):
            with suppress(OSError):  # a run without a word has them, too
                os.close(files.open_own(folder / name, APPEND))

    def __enter__(self) -> Watch:
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
        if self.files:
            try:
                _write(self.files[0], data)
            except OSError as error:
                self._lost(error)
        whole, newline, begun = data.rpartition(b"\n")
        if newline:
            self._read(self.begun[is_error] + whole)
            self.begun[is_error] = begun
        else:
            self.begun[is_error] = (self.begun[is_error] + data)[-LONGEST_LINE:]

    def _open(self) -> None:
        self.opened = True
        try:
            _forget(self.folder / METRICS, self.attempt)
            log = files.open_own(self.folder / log_name(self.attempt), APPEND | os.O_TRUNC)
            self.files = log, files.open_own(self.folder / METRICS, APPEND)
        except OSError as error:
            self._lost(error)

    def _read(self, text: bytes) -> None:
        """Read whole lines; most of a log is passed over in one look."""
        if not any(mark in text for mark in MARKS):
            return
        for line in text.decode(errors="replace").split("\n"):
            if self.speed:
                self.speed.read(line)
            for found in metrics.parse_all(line):
                self._keep(found)

    def _keep(self, found: Found) -> None:
        rates = self.speed.of(found) if self.speed and isinstance(found, Step) else None
        self.seen(found, rates)
        kept = json.dumps(metrics.as_record(found, self.attempt, rates)) + "\n"
        if self.files:
            try:
                _write(self.files[1], kept.encode())
            except OSError as error:
                self._lost(error)

    def _lost(self, error: OSError) -> None:
        self.tell(f"the log is kept no longer: {error.filename or LOG}: {error.strerror}")
        self._close()

    def _close(self) -> None:
        for file in self.files or ():
            with suppress(OSError):
                os.close(file)
        self.files = None


def log_name(attempt: int) -> str:
    """The file of an attempt's log: "log" of the first, then "log.1"."""
    return f"{LOG}.{attempt}" if attempt else LOG


def logs(folder: Path) -> list[Path]:
    """The logs that are kept of a run, the first attempt's first."""
    found = [path for path in folder.glob(f"{LOG}.*") if path.suffix[1:].isdecimal()]
    found.sort(key=lambda path: int(path.suffix[1:]))
    return [path for path in (folder / LOG, *found) if path.exists()]


def _forget(path: Path, attempt: int) -> None:
    """Leave out of the metrics what was kept of an attempt that is now read from its beginning."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    except FileNotFoundError:
        return
    kept = [line for line in lines if _attempt_of(line) not in (attempt, None)]
    if kept != lines:
        files.write(path, "".join(kept), 0o600)


def _attempt_of(line: str) -> object:
    """The attempt that a line is of; None where a launcher died as it wrote it."""
    try:
        return json.loads(line).get("attempt")
    except (ValueError, AttributeError):
        return None


def _write(file: int, data: bytes) -> None:
    """Write all of it, past what one call takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
