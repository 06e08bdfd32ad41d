"""Progress of a data job: a live line on a terminal, JSON lines where it is piped."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TextIO

from launcher.base.screen import Progress, printable
from launcher.tools.data.ledger import JobState

WIDTH = 24
"""Columns of the bar."""
SHOWN, LOGGED = 0.1, 5.0
"""Seconds between two reports, at least: on a terminal, and in lines."""


class Bar:
    """Shows how far a job is; call it with each JobState.

    As a context, it leaves the terminal's line empty for the error that ends the job.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._progress = Progress(stream or sys.stderr)
        self._started = self._last = time.monotonic()

    def __call__(self, done: JobState) -> None:
        """Report, unless the last report was just now."""
        now = time.monotonic()
        if now - self._last < (SHOWN if self._progress.live else LOGGED):
            return
        self._last = now
        if self._progress.live:
            self._progress.show(line(done, now - self._started))
        else:
            self._progress.note(_json(done, now - self._started, "working"))

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._progress.show("")

    def end(self, done: JobState, made: list[str]) -> None:
        """Say what was made of what."""
        seconds = time.monotonic() - self._started
        for name in done.without:
            self._progress.note(f"launcher: no document in {printable(name)}")
        if self._progress.live:
            self._progress.note(summary(done, seconds, made))
        else:
            self._progress.note(_json(done, seconds, "done", files=made))


def line(done: JobState, seconds: float) -> str:
    """A job's state in one line; no share and no remaining time where the size isn't known."""
    speed = f"{done.documents:,} documents {_speed(done, seconds)}"
    if not done.size:
        return speed
    share = min(done.read / done.size, 1)
    filled = "█" * round(share * WIDTH)
    left = _left(done, seconds)
    told = f"  {left // 60}:{left % 60:02} left" if left is not None else ""
    return f"{filled:░<{WIDTH}} {share:4.0%}  {speed}{told}"


def summary(done: JobState, seconds: float, made: list[str]) -> str:
    """What a job has done, in lines."""
    tokens = f", {done.tokens:,} tokens" if done.tokens else ""
    lines = [f"{done.documents:,} documents{tokens} in {seconds:.1f} s ({_speed(done, seconds)})"]
    if done.empty:
        lines.append(f"{done.empty:,} of them have no tokens")
    if done.blank:
        lines.append(f"{done.blank:,} empty lines, which are no documents")
    if done.rejected:
        lines.append(f"{done.rejected:,} records left out")
    return "\n".join([*lines, *(f"  {name}" for name in made)])


def _left(done: JobState, seconds: float) -> int | None:
    """Seconds to the end at the speed so far; None where the size isn't known, or no speed."""
    if not (done.size and done.read):
        return None
    return round(seconds * max(done.size - done.read, 0) / done.read)


def _rates(done: JobState, seconds: float) -> tuple[float, float]:
    """Documents and MB in a second."""
    seconds = max(seconds, 1e-3)
    return done.documents / seconds, done.read / seconds / 1e6


def _speed(done: JobState, seconds: float) -> str:
    documents, megabytes = _rates(done, seconds)
    return f"{documents:,.0f}/s  {megabytes:.1f} MB/s"


def _json(done: JobState, seconds: float, state: str, **more: object) -> str:
    documents, megabytes = _rates(done, seconds)
    told = {
        "state": state,
        "seconds": round(seconds, 3),
        **asdict(done),
        "documents_per_s": round(documents, 1),
        "mb_per_s": round(megabytes, 3),
        "eta_s": _left(done, seconds) if state == "working" else 0,
    }
    return json.dumps(told | more)
