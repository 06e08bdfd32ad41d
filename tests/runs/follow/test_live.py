"""The live line says where a run is, fits, and leaves nothing of itself in the terminal."""

from __future__ import annotations

import io
import math
import os
import pty
import re
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.base.settings import ROOT
from launcher.runs.follow.live import LiveLine, LiveState, line, terminal
from launcher.runs.records.metrics import Found, MemoryUse, TrainingStep, Validation
from launcher.runs.records.throughput import Rates

STEP = TrainingStep(120, 1000, 82.1, loss=2.635)
RATES = Rates(tokens_per_s=99_780, tflops_per_gpu=61.0, mfu=0.0617)
WHOLE = (
    "iteration 120/1000  loss 2.635  82.1 ms/step  99.8k tokens/s  61.0 TFLOP/s (6.2%)  "
    "ETA 72 s  mem 34.1 GB"
)
FULL = LiveState().after(MemoryUse(0, 2, max_reserved_mib=32520.0)).after(STEP, RATES)


def test_what_the_guard_told_outlasts_all_but_the_loss() -> None:
    told = line(replace(FULL, warning="nan at 90"), 50)
    assert told == "iteration 120/1000  loss 2.635  nan at 90"


def test_what_matters_least_goes_first() -> None:
    assert line(FULL, len(WHOLE)) == WHOLE
    shown = [set(re.split("  +", line(FULL, width))) for width in range(len(WHOLE), 17, -1)]
    assert all(later <= earlier for earlier, later in pairwise(shown))
    assert shown[-1] == {"iteration 120/1000"}
    order = [(one - other).pop() for one, other in pairwise(shown) if one - other]
    names = ["mem", "TFLOP/s", "tokens/s", "ETA", "ms/step", "loss"]
    assert [name in text for name, text in zip(names, order, strict=True)] == [True] * 6


@given(st.integers(0, 300), st.floats(), st.floats(), st.integers(0, 10**12), st.floats(0, 1e9))
def test_it_fits_any_width(
    width: int, loss: float, ms: float, iteration: int, memory: float
) -> None:
    step = TrainingStep(iteration, 10**6, ms, loss=loss)
    state = LiveState().after(MemoryUse(0, max_reserved_mib=memory)).after(step, RATES)
    text = line(state, width)
    assert len(text) <= width
    assert text.isprintable()
    assert text.isascii()


@pytest.mark.parametrize(
    ("found", "rates", "told"),
    [
        ([], None, r"^$"),
        ([Validation(1, loss=2.0)], None, r"^$"),
        ([TrainingStep(10, 10, 5.0)], None, r"^(?!.*ETA)"),
        ([TrainingStep(1, 2, 5.0, loss=math.nan)], None, r"loss nan"),
        ([TrainingStep(1, 2, 5.0, nan=3)], None, r"loss nan"),
        ([TrainingStep(1, 2, 5.0, skipped=10)], None, r"^(?!.*loss)"),
        (
            [TrainingStep(1, 2, 12_345.0, reported_tflops_per_gpu=8.7)],
            None,
            r"12\.3 s/step  8\.7 TFLOP/s  ETA",
        ),
        ([TrainingStep(1, 2, 5.0)], Rates(123.4, 0.00123), r"123 tokens/s  0\.0012 TFLOP/s"),
        (
            [STEP, *(MemoryUse(n, max_reserved_mib=1000.0 * (n + 1)) for n in (0, 2, 1))],
            None,
            r"mem 3\.1 GB",  # of the GPU that takes most
        ),
    ],
)
def test_what_is_told_of(found: list[Found], rates: Rates | None, told: str) -> None:
    state = LiveState()
    for each in found:
        state = state.after(each, rates)
    assert re.search(told, line(state, 200))


@pytest.mark.parametrize(
    ("times", "left", "told"),
    [
        ([100, 100, 9000, 100, 100], 10, "ETA 1 s"),
        ([1000], 89, "ETA 89 s"),
        ([1000], 720, "ETA 12 min"),
        ([1000], 12_000, "ETA 3 h 20 min"),
        ([1000], 187_200, "ETA 2 d 4 h"),
        ([1000, 1000, 1000, 9, 9, 9, 9, 9], 1000, "ETA 9 s"),
    ],
)
def test_the_time_left_goes_by_the_middle_of_the_last_few(
    times: list[float], left: int, told: str
) -> None:
    state = LiveState()
    for number, ms in enumerate(times):
        state = state.after(TrainingStep(number, number + left, ms))
    assert line(state, 200).endswith(told)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_where_it_is_drawn() -> None:
    both, pipe = Terminal(), io.StringIO()
    assert terminal(both, both, {"TERM": "xterm"}) is both
    assert terminal(pipe, both, {"TERM": "xterm"}) is None
    assert terminal(both, pipe, {"TERM": "xterm"}) is None
    assert terminal(both, both, {"TERM": "dumb"}) is None
    assert terminal(both, both, {}) is None


@dataclass
class Tty:
    """A terminal, as a program has it, and all that the program wrote to it."""

    out: TextIO
    seen: bytearray

    def write(self, live: LiveLine, data: bytes) -> None:
        live.hear(data)
        with live.passing(data):
            self.out.buffer.write(data)
            self.out.buffer.flush()

    def until(self, condition: Callable[[], bool]) -> bool:
        end = time.monotonic() + 10
        while not condition() and time.monotonic() < end:
            time.sleep(0.01)
        return condition()


@contextmanager
def tty() -> Iterator[Tty]:
    """A pty that passes bytes on as they are, read to its end."""
    ours, theirs = pty.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    seen = bytearray()

    def read() -> None:
        try:
            while data := os.read(ours, 65536):
                seen.extend(data)
        except OSError:
            return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w", encoding="utf-8") as out:
        yield Tty(out, seen)
    reader.join()
    os.close(ours)


LINE = rb"\r\x1b\[K(iteration [^\r\n]*)?"


def output_of(seen: bytes) -> bytes:
    """What was written but the live line, which stands at a line's beginning and always goes."""
    for drawn in re.finditer(LINE, seen):
        before = re.sub(LINE, b"", seen[: drawn.start()])
        assert not drawn[1] or before[-1:] in (b"", b"\n")
        assert not drawn[1] or seen.startswith(b"\r\x1b[K", drawn.end())
    return re.sub(LINE, b"", seen)


OUTPUT = [
    b"loading\r\n",
    b"one line\r\nand two\r\n",
    b"a bar  10%",
    b"\ra bar 100%",
    b"\r\n",
    "colour \x1b[31mred\x1b[0m, ünïcode\r\n".encode(),
    b"half of a li",
    b"ne\r\n",
    b"x" * 95 + b"\r\n",
    b"\xff\xfe broken\r\n",
    b"",
]


@given(
    st.lists(
        st.tuples(st.sampled_from(OUTPUT), st.booleans(), st.sampled_from([0.0, 0.0, 0.12])),
        max_size=12,
    )
)
@settings(max_examples=15)
def test_output_is_untouched_and_nothing_of_the_line_remains(
    pieces: list[tuple[bytes, bool, float]],
) -> None:
    with tty() as terminal, LiveLine(terminal.out, lambda: 80) as live:
        for number, (data, step, pause) in enumerate(pieces):
            if step:
                live.show(TrainingStep(number, 10**6, 10.0, loss=2.0), RATES)
            terminal.write(live, data)
            time.sleep(pause)
    written = b"".join(data for data, _, _ in pieces)
    assert output_of(bytes(terminal.seen)) == written


def test_it_stands_below_the_output_and_only_there() -> None:
    with tty() as terminal, LiveLine(terminal.out, lambda: 40) as live:
        first = b"\r\x1b[Kiteration 120/1000  loss 2.635"
        live.show(STEP, RATES)
        assert terminal.until(lambda: terminal.seen == first)
        terminal.write(live, b"half")
        assert terminal.until(lambda: terminal.seen == first + b"\r\x1b[Khalf")
        time.sleep(0.25)
        assert terminal.seen == first + b"\r\x1b[Khalf"
        terminal.write(live, b" and half\r\n")
        assert terminal.until(lambda: terminal.seen.endswith(b"half and half\r\n" + first))
        live.show(TrainingStep(121, 1000, 82.1, loss=2.5))
        assert terminal.until(lambda: b"121/1000" in terminal.seen)
    assert output_of(bytes(terminal.seen)) == b"half and half\r\n"


def test_the_first_steps_compilation_is_told_for_as_long_as_it_takes() -> None:
    with tty() as terminal, LiveLine(terminal.out, lambda: 40) as live:
        terminal.write(live, b"compiling the step: the first takes some time\r\n")
        terminal.write(live, b"W1125: not enough SMs\r\n")
        assert terminal.until(lambda: terminal.seen.endswith(b"compiling the first step  1 s"))
        terminal.write(live, b"fast: compiled; no CUDA graph\r\n")
        time.sleep(0.25)
        assert terminal.seen.endswith(b"graph\r\n")


def test_what_the_first_step_waits_for_is_told() -> None:
    """The screen was empty for 11 s, from the start to the first line of the log."""
    with tty() as terminal, LiveLine(terminal.out, lambda: 60) as live:
        for state in ("checking", "starting the container", "importing torch"):
            live.wait(state)
            assert terminal.until(lambda s=state: f"{s}  0 s".encode() in terminal.seen)
        terminal.write(live, b"loading\r\n")
        assert terminal.until(lambda: b"\nwaiting for the first step  " in plain(terminal.seen))
        live.show(STEP, RATES)
        assert terminal.until(lambda: terminal.seen.endswith(b"ETA 72 s"))


def plain(seen: bytearray) -> bytes:
    return bytes(seen).replace(b"\r\x1b[K", b"")


def test_two_threads_write_whole_lines_and_a_lost_terminal_is_nothing_to_the_run() -> None:
    class Lost(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    with LiveLine(Lost(), lambda: 80) as live:
        live.show(STEP)
        for _ in range(5):
            with live.passing(b"x\n"):
                time.sleep(0.03)
    with tty() as terminal, LiveLine(terminal.out, lambda: 80) as live:
        live.show(STEP)

        def write(name: bytes) -> None:
            for _ in range(200):
                terminal.write(live, name * 9 + b"\r\n")
                time.sleep(0.001)

        threads = [threading.Thread(target=write, args=(name,)) for name in (b"a", b"b")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = sorted(output_of(bytes(terminal.seen)).split(b"\r\n"))
    assert lines == [b"", *[b"a" * 9] * 200, *[b"b" * 9] * 200]


IN_BACKGROUND = """
import os, pty, sys
from launcher.runs.follow.live import _columns
pid, terminal = pty.fork()
if pid == 0:  # leads a session of its own, in the terminal's foreground
    front, other = _columns(), os.fork()
    if other == 0:
        os.setpgid(0, 0)
        os._exit(_columns())
    os._exit(front if os.waitpid(other, 0)[1] == 0 else 0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_run_in_the_background_has_no_line_over_what_is_typed() -> None:
    env = os.environ | {"COLUMNS": "72"}
    done = subprocess.run(
        [sys.executable, "-c", IN_BACKGROUND], env=env, cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout == b"72\n"
