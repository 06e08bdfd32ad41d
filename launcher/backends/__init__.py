"""The backends by name, each imported on first use: a backend carries a Plan out."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from launcher.errors import UsageError, nearest

if TYPE_CHECKING:
    from launcher.run.image import Facts
    from launcher.run.plan import Plan

BACKENDS = {"docker": "launcher.backends.docker"}


class Backend(Protocol):
    """What a backend does. `request` is pure; `launch` sends what it returns and nothing else."""

    def request(self, plan: Plan) -> Any:
        """What will be asked of the engine or scheduler."""

    def show(self, plan: Plan) -> str:
        """The same as commands that work when pasted into a shell."""

    def facts(self, image: str) -> Facts | None:
        """What is known of an image from itself; None where it isn't there."""

    def count_gpus(self) -> int | None:
        """How many GPUs a request for all would give; None where that can't be told."""

    def launch(self, plan: Plan, *, detach: bool) -> int:
        """Carry the plan out; the training program's exit code, or 0 once it is detached."""


def backend(name: str) -> Backend:
    """The backend called `name`. Raises UsageError that names the nearest where there is none."""
    if name not in BACKENDS:
        raise UsageError(f"no backend {name!r}", nearest(name, list(BACKENDS)))
    found: Backend = import_module(BACKENDS[name]).backend()
    return found
