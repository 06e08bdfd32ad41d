"""Shortens the lines of a training log for a terminal; a file or a pipe gets them as they are."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from launcher.base.screen import duration
from launcher.runs.follow.live import LiveLine, LiveState, OutputDetail, pace, short

if TYPE_CHECKING:
    from launcher.runs.records.metrics import TrainingStep, Validation
    from launcher.runs.records.watch import Speed

WIDTH = 100
"""Columns of a line at most."""

BEGINS = re.compile(
    rb"(node-\d+ \| )?\s*(\[[\d-]+ [\d:.]+\] )?(iteration +\d+/|validation loss at iteration )"
)
"""How the lines that are shortened begin."""

MAY_BEGIN = re.compile(rb"(node-\d+ \| )?\s*(\[[\d :.-]*\]? ?)?([iv][a-z ]*\d*)?")
"""What such a line may look like before it is complete."""

BOLD, RED, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"

Editor = Callable[[bytes, bool], bytes]
"""What of a piece of output is shown; the empty piece is the end, upon which all is."""


def editor(run: str, screen: LiveLine, environ: Mapping[str, str]) -> Editor:
    """What the screen shows of a run's output; NO_COLOR is heeded: https://no-color.org."""
    from launcher.runs.records import record

    def speed() -> Speed:
        from launcher.runs.records.watch import Speed

        return Speed(record.read(run, record.PLAN), record.read(run, record.FACTS))

    if screen.shown is OutputDetail.QUIET:
        return nothing
    if screen.stream and screen.shown is OutputDetail.USUAL:
        return CompactLines(speed, colours=not environ.get("NO_COLOR"), width=screen.width_of)
    return screen.edit


def nothing(data: bytes, is_error: bool) -> bytes:
    """Show nothing of a program's output."""
    return b""


class CompactLines:
    """Shows lines of steps and validations in a few columns, and the rest as it is."""

    def __init__(
        self, speed: Callable[[], Speed], *, colours: bool, width: Callable[[], int]
    ) -> None:
        self._speed_of = speed
        self._colours, self._width = colours, width
        self._begun, self._amid = {False: b"", True: b""}, {False: False, True: False}
        self._state = LiveState()

    def __call__(self, data: bytes, is_error: bool) -> bytes:
        """The piece as it is shown, without a line that hasn't ended and may be one of those."""
        whole = b""
        if self._amid[is_error]:  # a line of which some is shown goes on as it is
            whole, newline, data = data.partition(b"\n")
            if not newline:
                return whole
            whole += newline
        *lines, rest = (self._begun[is_error] + data).split(b"\n")
        held = bool(data and rest and (BEGINS.match(rest) or MAY_BEGIN.fullmatch(rest)))
        self._begun[is_error] = rest if held else b""
        self._amid[is_error] = bool(rest) and not held
        whole += b"".join(self._shown(line) + b"\n" for line in lines)
        return whole if held else whole + rest

    @cached_property
    def _speed(self) -> Speed:
        """Read once output comes, when the record is kept."""
        return self._speed_of()

    def _shown(self, line: bytes) -> bytes:
        if b"padded vocab" in line:
            self._speed.read_vocabulary(line.decode(errors="replace"))
        begun = BEGINS.match(line)
        return (begun and self._short(line, (begun[1] or b"").decode())) or line

    def _short(self, line: bytes, node: str) -> bytes | None:
        """The line in a few columns; None where it holds something else, or several records."""
        from launcher.runs.records import metrics

        found = metrics.parse_all(line.decode(errors="replace"))
        if len(found) != 1:
            return None
        (one,) = found
        if isinstance(one, metrics.TrainingStep):
            parts = self._step(one)
        elif isinstance(one, metrics.Validation):
            parts = validation(one)
        else:
            return None
        width = min(self._width() or WIDTH, WIDTH) - len(node)
        while len(parts) > 2 and len("  ".join(parts)) > width:
            parts.pop()
        text = node + "  ".join(parts)
        return (self._coloured(text) if self._colours else text).encode()

    def _step(self, step: TrainingStep) -> list[str]:
        """What is shown of a step, what matters least last."""
        rates = self._speed.rates_of(step)
        self._state = self._state.after(step, rates)
        size = len(str(step.train_iters))
        parts = [
            f"iteration {step.iteration:{size}}/{step.train_iters}",
            "loss nan" if step.loss is None and step.nan else _number("loss", step.loss, "#.4g"),
            f"skipped {step.skipped}" if step.skipped else "",
            _number("norm", step.grad_norm, "#.3g"),
            _number("rate", step.learning_rate, ".2e"),
            f"{short(rates.tokens_per_s)} tokens/s" if rates else "",
            pace(step.ms_per_step).removesuffix("/step"),
            f"{duration(self._state.seconds_left)} left" if self._state.seconds_left else "",
        ]
        return [part for part in parts if part]

    def _coloured(self, text: str) -> str:
        text = re.sub(r"loss nan|skipped \d+", lambda found: f"{RED}{found[0]}{PLAIN}", text)
        return re.sub(r"(?<=loss )[\d.e+-]+", lambda found: f"{BOLD}{found[0]}{PLAIN}", text)


def validation(found: Validation) -> list[str]:
    """What is shown of a validation."""
    parts = [
        f"{found.split} at {found.iteration}",
        _number("loss", found.loss, "#.4g"),
        _number("perplexity", found.perplexity, ".4g"),
    ]
    return [part for part in parts if part]


def _number(name: str, value: float | None, form: str) -> str:
    return "" if value is None else f"{name} {value:{form}}"
