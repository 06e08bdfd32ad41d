"""Lines of a log on a terminal: short, whole where they aren't of steps, and coloured by a rule."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.follow import compact, live
from launcher.runs.follow.compact import CompactLines
from launcher.runs.follow.live import LiveLine, OutputDetail
from launcher.runs.records.watch import Speed

STEP = (
    " [2026-11-27 16:19:52] iteration  {at:7d}/  200000 | consumed samples:           40 | "
    "elapsed time per iteration (ms): 899.2 | learning rate: 1.000000E-02 | global batch size:"
    "     8 | lm loss: 5.358822E+00 | loss scale: 1.0 | grad norm: 1.522 | number of skipped "
    "iterations:   0 | number of nan iterations:   0 |"
)
VALID = (
    "validation loss at iteration 6 | lm loss value: 4.751435E+00 | lm loss PPL: 1.157503E+02 | "
)


def shown(*pieces: str, width: int = 120, colours: bool = False) -> str:
    edit = CompactLines(lambda: Speed(None, None), colours=colours, width=lambda: width)
    return b"".join(edit(piece.encode(), False) for piece in (*pieces, "")).decode()


def test_a_step_has_what_is_looked_at_in_100_columns() -> None:
    """A line of Megatron's had 300 columns, three lines of a terminal."""
    assert shown(STEP.format(at=5) + "\n") == (
        "iteration      5/200000  loss 5.359  norm 1.52  rate 1.00e-02  899.2 ms  2 d 1 h left\n"
    )
    assert shown(f"{VALID}\n") == "validation at 6  loss 4.751  perplexity 115.8\n"
    assert (
        shown(f"node-1 | {VALID}\n") == "node-1 | validation at 6  loss 4.751  perplexity 115.8\n"
    )


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_what_matters_least_is_left_out_of_a_narrow_terminal(width: int) -> None:
    line = shown(STEP.format(at=5) + "\n", width=width).rstrip("\n")
    assert line.startswith("iteration      5/200000  loss 5.359")
    assert len(line) <= max(min(width, compact.WIDTH), 36)


def test_a_nan_is_seen() -> None:
    """Megatron leaves a loss that is NaN out of its line."""
    line = STEP.format(at=5).replace("lm loss: 5.358822E+00 | ", "")
    line = line.replace("nan iterations:   0", "nan iterations:   1")
    assert "  loss nan  " in shown(f"{line}\n")
    assert "\x1b[31mloss nan\x1b[0m" in shown(f"{line}\n", colours=True)


WORDS = ["loading\n", STEP.format(at=1) + "\n", "two " + STEP.format(at=2) + "\n", f"{VALID}\n"]


@given(st.lists(st.sampled_from([*WORDS, "a bar 10%", "\rit", "[2026", "\n"])), st.integers(1, 90))
def test_however_it_is_cut_nothing_else_is_lost(words: list[str], size: int) -> None:
    """A piece may end within a line, and what was held back of it has to come."""
    whole = "".join(words)
    pieces = [whole[at : at + size] for at in range(0, len(whole), size)]
    assert shown(*pieces) == shown(whole)
    kept = [line for line in whole.split("\n") if "iteration " not in line]
    assert [line for line in shown(*pieces).split("\n") if line in kept] == kept


def test_the_editor_goes_by_the_terminal_the_option_and_no_color(tmp_path: Path) -> None:
    """A pipe or a file gets upstream's line as it is."""
    line = f"{STEP.format(at=5)}\n".encode()

    class Terminal(LiveLine):
        def __init__(self, shown: OutputDetail, *, there: bool) -> None:
            super().__init__(None, lambda: 100, shown)
            self.stream = object() if there else None  # type: ignore[assignment]

    def edited(kind: OutputDetail, *, there: bool, **environ: str) -> bytes:
        return compact.editor("0a1b2c3d", Terminal(kind, there=there), environ)(line, False)

    assert edited(OutputDetail.USUAL, there=False) == edited(OutputDetail.WHOLE, there=True) == line
    assert edited(OutputDetail.QUIET, there=False) == edited(OutputDetail.QUIET, there=True) == b""
    coloured = edited(OutputDetail.USUAL, there=True).decode()
    assert "\x1b[1m5.359\x1b[0m" in coloured
    plain = edited(OutputDetail.USUAL, there=True, NO_COLOR="1").decode()
    assert plain == re.sub(r"\x1b\[\d*m", "", coloured) != coloured
    assert edited(OutputDetail.USUAL, there=True, NO_COLOR="").decode() == coloured


def test_where_no_terminal_is_the_states_are_told_only_when_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A log of CI would have lines on each start that nobody asked for."""
    for kind in OutputDetail:
        with LiveLine(None, shown=kind) as line:
            line.wait("importing torch")
    assert capsys.readouterr().err == "launcher: importing torch\n"


def test_screens_are_one_within_another() -> None:
    """The check and the run draw one line, not two over each other."""
    with live.screened(OutputDetail.QUIET):
        outer = live.screen
        with live.screened():
            assert live.screen is outer
        assert live.screen is outer
    assert live.screen is live.NO_SCREEN
