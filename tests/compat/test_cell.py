"""A cell's own process: how the series that started it ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

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
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.1)
        process.kill()
        assert process.wait() == 130
