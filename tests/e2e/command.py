"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys

from launcher.settings import ROOT


def launcher(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m launcher` with `args` and, beside this environment, `env`."""
    return subprocess.run(
        [sys.executable, "-m", "launcher", *args],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
    )


def refused(done: subprocess.CompletedProcess[str], code: int, *said: str) -> None:
    """Assert one clear message, the documented exit code, and no traceback."""
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert "launcher: " in done.stderr
    for text in said:
        assert text in done.stderr
