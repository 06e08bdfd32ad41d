"""What this machine's own programs tell, and backends that ask it nothing of runs' machines."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from launcher.errors import EngineError


def count_gpus() -> int | None:
    """The GPUs that the driver lists; None where there is no driver to ask."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if listed.returncode != 0:
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None


def ask(
    argv: Sequence[str],
    remedy: str,
    *,
    env: Mapping[str, str] | None = None,
    given: str = "",
    timeout: float = 60,
) -> str:
    """What a program prints of what it is given to read.

    Raises EngineError where it isn't there, which `remedy` mends, or fails.
    """
    name = argv[0]
    if shutil.which(name) is None:
        raise EngineError(f"there is no {name} here", remedy)
    try:
        done = subprocess.run(
            argv, input=given, capture_output=True, text=True, timeout=timeout, env=env
        )
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"{name}: no answer within {timeout:.0f} s") from error
    if done.returncode:
        told = done.stderr.strip() or done.stdout.strip()
        raise EngineError(f"{name}: {told or f'exit code {done.returncode}'}")
    return done.stdout


def tell(text: str) -> None:
    """A line of the launcher's own."""
    print(f"launcher: {text}", file=sys.stderr, flush=True)


class Scheduled:
    """What backends have in common for which a scheduler chooses the machines."""

    every_node = False
    scheduled = True

    def facts(self, image: str) -> None:
        """What is on the nodes isn't known here: the run file's release counts."""

    def count_gpus(self) -> None:
        """Nor how many GPUs they have."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)
