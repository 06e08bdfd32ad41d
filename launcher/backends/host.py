"""What this machine's own tools tell of its GPUs."""

from __future__ import annotations

import subprocess


def count_gpus() -> int | None:
    """The GPUs that the driver lists; None where there is no driver to ask."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None
