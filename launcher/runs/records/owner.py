"""Lock and stop request of a run, so that one launcher supervises it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from launcher.base import files
from launcher.base.settings import runs_folder
from launcher.runs.records import record

LOCK, STOP, STARTING = "followed", "stop-asked", "starting"

PATIENCE = 30.0


@contextmanager
def following(run: str) -> Iterator[bool]:
    """Follow a run for as long as this lasts; whether nobody else does.

    The kernel knows: a lock beside the run's record ends with the process that holds it. Without
    a record, as of another user's run, nobody else is known of.
    """
    with _opened(record.folder(run) / LOCK) as handle:
        yield handle is None or files.try_lock(handle) is not False


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other launcher of this user is starting a run, and keep others waiting.

    Two that look at the same moment whether a folder is taken would both find it free. One that
    hangs as it starts is waited for no longer than PATIENCE seconds.
    """
    runs = runs_folder()
    with suppress(OSError):
        runs.mkdir(parents=True, exist_ok=True, mode=0o700)
    with _opened(runs / STARTING) as handle:
        until = time.monotonic() + PATIENCE
        while handle is not None and files.try_lock(handle) is False and time.monotonic() < until:
            time.sleep(0.05)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A file to lock, made where it isn't there; None where it can't be."""
    handle = None
    with suppress(OSError):
        handle = files.open_own(path, os.O_RDWR | os.O_CREAT)
    with nullcontext() if handle is None else files.closing_handle(handle):
        yield handle


def ask_to_stop(run: str) -> None:
    """Note that the run was asked to stop, so that whoever follows it doesn't start it again."""
    with suppress(OSError):
        os.close(files.open_own(record.folder(run) / STOP, os.O_WRONLY | os.O_CREAT))


def asked_to_stop(run: str) -> bool:
    """Whether that was noted."""
    return (record.folder(run) / STOP).exists()


def stop_in_pause(run: str) -> bool:
    """Ask whoever waits to start the run again not to; False where nobody does."""
    with following(run) as nobody:
        if not nobody:
            ask_to_stop(run)
    return not nobody
