"""Writes output files aside and publishes them together, one job at a time."""

from __future__ import annotations

import errno
import fcntl
import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

from launcher.base import files
from launcher.base.errors import UsageError
from launcher.base.files import PendingFile
from launcher.base.trust import require_trusted

FULL = {
    errno.ENOSPC: "Free some of the disk, or name a file on another.",
    errno.EDQUOT: "Free some of your share of the disk, or name a file on another.",
    errno.EFBIG: "Raise the limit: ulimit -f unlimited; or --shard makes smaller files.",
}
"""What to do where a file can't grow."""


class OutputBusy(UsageError):
    """Another job writes the same files."""


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Where there is no room for what is written within: UsageError, which names the file."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise UsageError(
            f"{error.filename or target}: {error.strerror}",
            f"Nothing was written. {FULL[error.errno]}",
        ) from None


def alone(written: Sequence[Path], stack: ExitStack) -> list[PendingFile]:
    """New files for this job alone, that will be `written`; `stack` removes and closes them.

    Raises OutputBusy where another job writes one, UsageError where a folder isn't there or a name
    is that of something else than a file, ForeignFileError where other users write in the folder.
    """
    for target in written:
        if not target.parent.is_dir():
            remedy = f"Make it: mkdir -p {target.parent}"
            raise UsageError(f"{target.parent}: no such folder", remedy)
        if target.exists() and not target.is_file():
            raise UsageError(f"{target}: it isn't a file", "Take another name for the output.")
    require_trusted(written[0].parent)
    token = secrets.token_hex(8)
    with files.folder_lock(written[0].parent), ExitStack() as opened:
        for target in written:
            if files.sweep(target):
                remedy = "Wait for it, or choose another name."
                raise OutputBusy(f"{target}: another job writes it", remedy)
        found = [opened.enter_context(PendingFile(target, token=token)) for target in written]
        stack.push(opened.pop_all())
    return found


def wait(target: Path) -> None:
    """Return when no job writes a file any more, whether it was completed or not."""
    for path in files.asides(target).values():
        with suppress(FileNotFoundError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH)


class Output(Protocol):
    """What a job writes."""

    def complete(self) -> None:
        """Bring all of it to the disk, aside."""

    def publish(self) -> None:
        """Give it its name."""


def publish(outputs: Sequence[Output]) -> None:
    """Complete all, and only then name any."""
    for output in outputs:
        output.complete()
    for output in outputs:
        output.publish()
