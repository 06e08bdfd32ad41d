"""A program that fails shows its own frames, and none of what started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.settings import ROOT

FAILS = "def inner():\n    raise ValueError('no gizmo') from KeyError('a')\n\n\ninner()\n"


@pytest.mark.parametrize("as_module", [False, True])
def test_a_failing_script_s_traceback_begins_with_the_script(
    tmp_path: Path, as_module: bool
) -> None:
    """Twenty lines of ours stood above the two of the user's."""
    script = tmp_path / "fails.py"
    script.write_text(FAILS, encoding="utf-8")
    argv = ["-m", "fails"] if as_module else [str(script)]
    start = [sys.executable, str(ROOT / "launcher/agent/start.py"), "ranks.stacks"]
    done = subprocess.run(
        [*start, *argv],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    told = done.stderr.splitlines()
    frames = [line for line in told if line.startswith("  File ")]
    assert [
        line.partition('"')[2].partition('"')[0] for line in frames if "<string>" not in line
    ] == [str(script)] * 2
    assert told[-1] == "ValueError: no gizmo"
    assert "KeyError: 'a'" in told
