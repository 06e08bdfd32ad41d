"""A cell's own process: what it tells of a failure, how the series that started it ends it."""

from __future__ import annotations

import errno
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.engine import connect
from launcher.errors import EngineError
from launcher.settings import ROOT
from launcher.trials import cell
from launcher.trials.result import Cell
from launcher.trials.series import Options


def test_a_series_in_the_background_can_end_it() -> None:
    """A shell starts background jobs deaf to SIGINT, and so are their children."""
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.trials.cell"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as process:
        deadline = time.monotonic() + 60
        while is_deaf(process.pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)  # once: a second one would break off its leaving
        try:
            assert process.wait(20) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("error", "reason", "tail"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            "[Errno 28] No space left on device",
            (),
        ),
        (EngineError("the engine is gone", "Start it."), "the engine is gone", ("  Start it.",)),
        (OSError(), "OSError()", ()),
    ],
)
def test_what_system_or_engine_refuse_is_told(
    monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str, tail: tuple[str, ...]
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(connect, "connect", refuse)
    said: list[Mapping[str, Any]] = []
    found = cell.examine(Options().asked(Cell("24.10", "0.9.0")), said.append)
    assert found == {"verdict": "fails", "stage": "pull", "reason": reason, "tail": tail}


def is_deaf(pid: int) -> bool:
    """Whether a process ignores SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    ignored = re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    assert ignored is not None
    return bool(int(ignored[1], 16) >> (signal.SIGINT - 1) & 1)
