"""What `matrix compat` takes beside its builds and probes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

from bench.measure import Figure, timed

TAG = "cpu"


def figures(base: str, builder: str) -> list[Figure]:
    """Seconds of a series of one cell that are in none of its stages, removing included."""
    images = ("--base", base, "--builder", builder)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "launcher", "matrix", "compat", TAG, *images, "-o", folder]
        whole = timed([*command, "--no-train", "--disk", "100"], dict(os.environ))
        report = json.loads(Path(folder, "report.json").read_text(encoding="utf-8"))
    (cell,) = report["cells"]
    staged = sum(cell["seconds"].values())
    return [Figure("matrix compat, beside builds and probes, a row", whole - staged, 5.0, "s")]
