"""Passes on a run's output, with a progress line below it."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, TextIO

from launcher.agent.words import compiling
from launcher.base.screen import ERASE, bare, duration

if TYPE_CHECKING:
    from launcher.runs.records.metrics import Found, TrainingStep
    from launcher.runs.records.throughput import Rates

FIRST_STEP = "waiting for the first step"
INTERVAL = 0.1
"""Seconds between two drawings, at least."""

KEPT_TIMES = 5
MIB = 1 << 20


@dataclass(frozen=True)
class LiveState:
    """What is known of a run so far: its newest step, and the times of the last few, in ms.

    `memory_mib` is that of the GPU that reserved most; `warning` is the guard's newest.
    """

    step: TrainingStep | None = None
    rates: Rates | None = None
    times: tuple[float, ...] = ()
    memory_mib: float | None = None
    warning: str = ""

    @property
    def seconds_left(self) -> float:
        """By the middle of the last few times; 0 before the first step."""
        if self.step is None:
            return 0.0
        left = self.step.train_iters - self.step.iteration
        return left * median(self.times or [self.step.ms_per_step]) / 1000

    def after(self, found: Found, rates: Rates | None = None) -> LiveState:
        """The state after `found` in the log."""
        from launcher.runs.records.metrics import MemoryUse, TrainingStep

        if isinstance(found, TrainingStep):
            times = (*self.times, found.ms_per_step)[-KEPT_TIMES:]
            return replace(self, step=found, rates=rates, times=times)
        if isinstance(found, MemoryUse):
            sizes = (self.memory_mib, found.max_reserved_mib or found.reserved_mib)
            return replace(self, memory_mib=max((size for size in sizes if size), default=None))
        return self


def line(state: LiveState, width: int) -> str:
    """The state in at most `width` columns, the important first. Empty until the first step."""
    if state.step is None or width <= 0:
        return ""
    parts = _parts(state.step, state)
    while len(parts) > 1 and len(_joined(parts)) > width:
        parts.remove(max(parts))
    return _joined(parts)[:width]


def _joined(parts: list[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in parts)


def _parts(step: TrainingStep, state: LiveState) -> list[tuple[int, str]]:
    """What there is to say, from left to right; the highest numbers matter least."""
    rates = state.rates
    tflops = rates.tflops_per_gpu if rates else step.reported_tflops_per_gpu
    share = f" ({rates.mfu:.1%})" if rates and rates.mfu is not None else ""
    memory, digits = state.memory_mib, ".1f" if (tflops or 0) >= 1 else ".2g"  # of a CPU's
    parts = [
        (0, f"iteration {step.iteration}/{step.train_iters}"),
        (1, _loss(step)),
        (2, state.warning),
        (3, pace(step.ms_per_step)),
        (5, f"{short(rates.tokens_per_s)} tokens/s" if rates else ""),
        (6, f"{tflops:{digits}} TFLOP/s{share}" if tflops is not None else ""),
        (4, f"ETA {duration(state.seconds_left)}" if state.seconds_left > 0 else ""),
        (7, f"mem {memory * MIB / 1e9:.1f} GB" if memory else ""),
    ]
    return [part for part in parts if part[1]]


def _loss(step: TrainingStep) -> str:
    """The loss; Megatron's line has none where it was NaN, but counts those iterations."""
    if step.loss is None:
        return "loss nan" if step.nan else ""
    return f"loss {step.loss:#.4g}"


def pace(ms: float) -> str:
    """A step's time: 82.1 ms/step, 12.3 s/step."""
    return f"{ms:.1f} ms/step" if ms < 10_000 else f"{ms / 1000:.1f} s/step"


def short(number: float) -> str:
    """A number in few figures: 985, 99.8k, 1.2M."""
    if number < 1000:
        return f"{number:.0f}"
    return f"{number / 1000:.1f}k" if number < 999_950 else f"{number / 1e6:.1f}M"


def terminal(stdout: TextIO, stderr: TextIO, environ: Mapping[str, str]) -> TextIO | None:
    """Where a live line may be drawn: stderr, where it and stdout are on a terminal that can."""
    able = environ.get("TERM", "") not in ("", "dumb")
    return stderr if able and stdout.isatty() and stderr.isatty() else None


def _columns() -> int:
    """The terminal's width; none in the background, where a line would wipe out what is typed."""
    with suppress(OSError):  # it isn't this session's
        if os.tcgetpgrp(sys.stderr.fileno()) != os.getpgrp():
            return 0
    return shutil.get_terminal_size().columns


class OutputDetail(Enum):
    """How much of a run is shown: its output not at all, short on a terminal, or whole."""

    QUIET = "quiet"
    USUAL = "usual"
    WHOLE = "whole"


class LiveLine:
    """Draws the line below the output, and takes it away before more output passes.

    Before the first step it says what is waited for. All that is written to the terminal meanwhile
    has to go through `passing`. The line stands only where the output ended a line, for as long as
    nothing more comes. Without a `stream` nothing is drawn. A terminal that is lost ends the
    drawing, not the run.
    """

    def __init__(
        self,
        stream: TextIO | None,
        width_of: Callable[[], int] = _columns,
        shown: OutputDetail = OutputDetail.USUAL,
    ) -> None:
        self.stream = stream and bare(stream)
        self.width_of = width_of
        self.shown = shown
        self.edit: Callable[[bytes, bool], bytes] = lambda data, is_error: data
        self._awaited, self._since = "", 0.0
        self._state = LiveState()
        self._compiles: float | None = None  # since when
        self._text = ""  # what stands there now
        self._at_start = True
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Event()
        if stream:
            threading.Thread(target=self._keep_drawing, daemon=True).start()

    def __enter__(self) -> LiveLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def show(self, found: Found, rates: Rates | None = None) -> None:
        """Show what is new in the log."""
        self._state = self._state.after(found, rates)
        self._changed.set()

    def wait(self, text: str) -> None:
        """Show what is waited for, from now on to the first step."""
        if self.shown is OutputDetail.WHOLE and not self.stream:
            tell(text)
        self._state = LiveState()
        self._awaited, self._since = text, time.monotonic()
        self._changed.set()

    def hear(self, data: bytes) -> None:
        """Know by a piece of the program's output what it is at."""
        if data and self._awaited not in ("", FIRST_STEP):
            self._awaited = FIRST_STEP
        before = self._compiles or time.monotonic()
        self._compiles = before if compiling(data, self._compiles is not None) else None

    def warn(self, text: str) -> None:
        """Show what is wrong, in a few words, from now on."""
        self._state = replace(self._state, warning=text)
        self._changed.set()

    @contextmanager
    def passing(self, data: bytes) -> Iterator[None]:
        """Keep the line away while `data` is written, to stdout or stderr, and flushed."""
        if not self.stream:
            yield
            return
        with self._lock:
            self._put("")
            yield
            if data:
                self._at_start = data.endswith(b"\n")
        self._changed.set()

    def close(self) -> None:
        """Take the line away for good."""
        with self._lock:
            self._put("")
            self._closed = True
        self._changed.set()

    def _keep_drawing(self) -> None:
        while not self._closed:
            self._changed.wait(1.0 if self._awaited or self._compiles else None)
            self._changed.clear()
            with self._lock:
                if self._at_start and not self._closed:
                    self._put(line(self._state, self.width_of() - 1) or self._waits())
            time.sleep(INTERVAL)

    def _waits(self) -> str:
        """What the first step waits for: what torch compiles once is there for all others."""
        awaited, since = self._awaited, self._since
        if self._compiles is not None:
            awaited, since = "compiling the first step", self._compiles
        text = f"{awaited}  {duration(time.monotonic() - since)}" if awaited else ""
        return text[: max(0, self.width_of() - 1)]

    def _put(self, text: str) -> None:
        """Let `text` stand there, "" for nothing."""
        if not self.stream or self._closed or text == self._text:
            return
        self._text = text
        with suppress(OSError, ValueError):  # closed, or gone
            self.stream.write(ERASE + text)
            self.stream.flush()


NO_SCREEN = screen = LiveLine(None)
"""What stands at the bottom of the terminal while a run is followed."""


@contextmanager
def screened(shown: OutputDetail = OutputDetail.USUAL) -> Iterator[None]:
    """Draw the live line where stdout and stderr are a terminal; within another, it is that."""
    global screen
    if screen is not NO_SCREEN:
        yield
        return
    stream = terminal(sys.stdout, sys.stderr, os.environ)
    try:
        with LiveLine(stream, shown=shown) as screen:
            yield
    finally:
        screen = NO_SCREEN


class LostTerminal(OSError):
    """The terminal has gone; unlike a closed pipe, that is no wish to stop the run."""


def write(data: bytes, is_error: bool) -> None:
    """Pass a piece of output on, as it is shown. Raises LostTerminal, BrokenPipeError of a pipe."""
    out = sys.stderr.buffer if is_error else sys.stdout.buffer
    screen.hear(data)
    data = screen.edit(data, is_error)
    try:
        with screen.passing(data):
            out.write(data)
            out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise LostTerminal(*error.args) from error


def tell(text: str) -> None:
    """A line of the launcher's own, on stderr; where nobody reads that, the run goes before."""
    line = f"launcher: {text}\n"
    try:
        with screen.passing(line.encode()):
            print(line, end="", file=sys.stderr, flush=True)
    except BrokenPipeError:
        to_nowhere(sys.stderr)
    except OSError:
        return


def to_nowhere(stream: TextIO) -> None:
    """Let a stream whose reader has gone lose what it still holds, and what is to come."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
