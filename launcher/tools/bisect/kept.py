"""The folders of bisects among the records, as `runs prune` lists them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from launcher.base import files
from launcher.base.settings import settings
from launcher.runs.records.recorded_runs import RUNNING, RunSummary

FINISHED, NAME = "finished", re.compile(r"bisect-[0-9a-f]{12}")
REQUEST = "bisect.json"


def summaries() -> Iterator[RunSummary]:
    """Each as a run that has ended, unless somebody is at it; created when it was last begun."""
    with suppress(OSError):
        for folder in sorted(settings().runs.iterdir()):
            with suppress(OSError):
                if NAME.fullmatch(folder.name):
                    yield _summary(folder)


def _summary(folder: Path) -> RunSummary:
    """Raises OSError where it isn't a bisect's."""
    begun = datetime.fromtimestamp(os.stat(folder / REQUEST).st_mtime, timezone.utc)
    with files.closing_handle(os.open(folder, os.O_RDONLY | os.O_DIRECTORY)) as handle:
        state = RUNNING if files.try_lock(handle) is False else FINISHED
    at = begun.isoformat(timespec="seconds")
    name, nothing = folder.name, None
    return RunSummary(name, name, state, nothing, at, "", "", "", nothing, nothing, str(folder))
