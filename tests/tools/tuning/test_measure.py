"""When a run that is measured has said enough, by the lines of its log."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from launcher.runs.records.metrics import TrainingStep
from launcher.tools.tuning import measure
from launcher.tools.tuning.candidates import Setting
from launcher.tools.tuning.measure import Runs, has_told, is_slow, lines_every, settled, short
from launcher.trainer.gpt import log
from tests.tables import table
from tests.tools.tuning.test_candidates import space


@table("ms", "told", "slow")
def test_a_late_compilation_is_not_what_a_step_takes(ms: list[int], told: bool, slow: bool) -> None:
    """Upstream's fused functions compile in steps 6 to 10, which made 80 ms a step 1060."""
    steps = [TrainingStep(5 * (at + 1), 25, each) for at, each in enumerate(ms)]
    assert has_told(steps) == told
    assert is_slow(steps, 100.0) == slow


def test_slow_steps_have_a_line_each() -> None:
    """Of a model whose step takes ten seconds, 25 steps were a run of four minutes."""
    assert [lines_every(25, ms) for ms in (None, 16, 400, 10_000)] == [5, 5, 2, 1]
    steps = [TrainingStep(at + 1, 25, ms) for at, ms in enumerate((60_000, 900, 900, 900, 500))]
    assert [step.ms_per_step for step in settled(steps)] == [500]
    assert not has_told(steps)
    assert has_told([*steps, TrainingStep(6, 25, 505)])
    last = [short(space().config, 25, each)["megatron_args.exit_interval"] for each in (1, 2, 5)]
    assert last == [9, 26, 25]


LINE = log.training_line(
    "2025-04-13 23:41:20", iteration=5, train_iters=25, consumed_samples=1, milliseconds=100,
    learning_rate=1, global_batch_size=1, loss=1, loss_scale=1, grad_norm=1, skipped=0, nan=0,
)  # fmt: skip


@pytest.mark.parametrize(("lines", "ms"), [(1, None), (2, 100.0)])
def test_a_run_ends_with_the_time_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int, ms: float | None
) -> None:
    """A first run took its time, whatever `--minutes` said, and so did the traced one."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    text = "".join(f"{LINE.replace('  5/', f' {5 * at:2}/')}\n" for at in range(1, lines + 1))
    argv = [sys.executable, "-c", f"print({text!r}, flush=True); import time; time.sleep(600)"]
    monkeypatch.setattr(Runs, "_argv", lambda *_: argv)
    given: dict[str, object] = {"logging.log_interval": 5}
    runs = Runs("tune-1", (), (), given, time.monotonic() + 4, lambda text: None)
    found = runs(Setting())
    assert (found and found.ms) == ms
    assert (tmp_path / "tune-1" / measure.MEASUREMENTS).exists() == (ms is not None)
    runs.last = 600
    assert runs(Setting((("a", 1),))) is None
    assert runs.shares(Setting()) == {}


def test_what_torch_has_compiled_takes_no_time_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that compiles for a minute had one row in three: no run was begun after it."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    lines = f"compiled the step in 500 s\n{LINE}\n{LINE.replace('  5/', ' 10/')}\n"
    monkeypatch.setattr(Runs, "_argv", lambda *_: [sys.executable, "-c", f"print({lines!r})"])
    given: dict[str, object] = {"logging.log_interval": 5}
    runs = Runs("tune-2", (), (), given, time.monotonic() + 300, lambda text: None)
    assert runs(Setting())
    runs.last = 10.0  # of which the 500 are no part
    assert runs(Setting((("data.num_workers", 4),)))
    runs.last = 10.0
    assert runs(Setting((("training.micro_batch_size", 4),))) is None
