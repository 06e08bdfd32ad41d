"""The backends by name, each imported on first use: a backend carries a Plan out."""

from __future__ import annotations

from importlib import import_module

from launcher.errors import UsageError, nearest
from launcher.plan.job import Backend

BACKENDS = {
    "docker": "launcher.backends.docker",
    "local": "launcher.backends.local",
    "compose": "launcher.backends.compose",
}


def backend(name: str) -> Backend:
    """The backend called `name`. Raises UsageError that names the nearest where there is none."""
    if name not in BACKENDS:
        raise UsageError(f"no backend {name!r}", nearest(name, list(BACKENDS)))
    found: Backend = import_module(BACKENDS[name]).backend()
    return found
