"""The backends by name, each imported on first use: a backend carries a Plan out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from launcher.errors import UsageError, nearest
from launcher.plan.job import Backend

if TYPE_CHECKING:
    from launcher.plan.config import RunConfig

BACKENDS = {
    "docker": "launcher.backends.docker",
    "local": "launcher.backends.local",
    "compose": "launcher.backends.compose",
    "slurm": "launcher.backends.slurm",
    "kubernetes": "launcher.backends.kubernetes",
}


def backend(name: str) -> Backend:
    """The backend called `name`. Raises UsageError that names the nearest where there is none."""
    if name not in BACKENDS:
        raise UsageError(f"no backend {name!r}", nearest(name, list(BACKENDS)))
    found: Backend = import_module(BACKENDS[name]).backend()
    return found


def configured(chosen: Backend, config: RunConfig) -> Backend:
    """The backend as a run file asks for it: a scheduler's has keys of its own there."""
    found: Backend = getattr(chosen, "configured", lambda config: chosen)(config)
    return found
