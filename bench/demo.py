"""`make demo` from a fresh clone: cold, with nothing cached, and again."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from bench.measure import ROOT, Figure, timed


def figures() -> list[Figure]:
    """Seconds of `make demo` in a clone with a cache of its own, twice."""
    with tempfile.TemporaryDirectory(prefix="launchpad-bench-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        env = {"LAUNCHER_CACHE": f"{folder}/cache"}
        command = ["make", "-C", str(clone), "demo"]
        cold, warm = timed(command, env), timed(command, env)
    return [
        Figure("make demo from a fresh clone, cold", cold, 300, "s"),
        Figure("make demo, warm", warm, 45, "s"),
    ]
