"""Protocol: a `Listener` takes a run's output beside the terminal; a `Listening` begins them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from launcher.runs.plan.job import Job


class Listener(Protocol):
    """What is done with a run's output beside passing it on."""

    def add(self, data: bytes, is_error: bool) -> None:
        """Take a piece of it, each byte once."""


Listening = Callable[[Job], AbstractContextManager[Sequence[Listener]]]
"""Who listens to a job that this launcher follows as its own."""


@contextmanager
def nobody(job: Job) -> Iterator[Sequence[Listener]]:
    """Nobody listens."""
    yield ()
