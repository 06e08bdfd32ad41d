"""The backends by name, each imported on first use: a backend carries a Plan out.

Other packages bring more, as entry points of the group `launchpad.backends`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError, nearest
from launcher.runs.plan.job import Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

GROUP = "launchpad.backends"
BACKENDS = {
    "docker": "launcher.runs.backends.docker.docker",
    "local": "launcher.runs.backends.local",
    "compose": "launcher.runs.backends.compose.compose",
    "slurm": "launcher.runs.backends.slurm.slurm",
    "kubernetes": "launcher.runs.backends.kubernetes.kubernetes",
}


def backend(name: str) -> Backend:
    """The backend `name`: ours, or that of a package's entry point. Raises UsageError."""
    if name in BACKENDS:
        found: Backend = import_module(BACKENDS[name]).backend()
        return found
    others = _brought()
    if name not in others.names:
        raise UsageError(f"no backend {name!r}", nearest(name, names()))
    found = others[name].load()()
    return found


def names() -> list[str]:
    """The names of all backends, ours first."""
    return [*BACKENDS, *sorted(_brought().names - BACKENDS.keys())]


def _brought() -> EntryPoints:
    from importlib.metadata import entry_points

    return entry_points(group=GROUP)
