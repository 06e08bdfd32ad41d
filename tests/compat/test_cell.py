"""A cell's own process: how the series that started it ends it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from launcher.settings import ROOT


def test_a_series_in_the_background_can_end_it() -> None:
    """A shell starts background jobs deaf to SIGINT, and so are their children."""
    with subprocess.Popen(
        [sys.executable, "-m", "launcher.compat.cell"],
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


def is_deaf(pid: int) -> bool:
    """Whether a process ignores SIGINT."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    ignored = re.search(r"^SigIgn:\s*(\w+)$", status, re.MULTILINE)
    assert ignored is not None
    return bool(int(ignored[1], 16) >> (signal.SIGINT - 1) & 1)
