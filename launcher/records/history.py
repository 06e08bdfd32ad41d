"""How the attempts of a run ended, and who ended them: kept in the folder of its record."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any

from launcher import files
from launcher.plan.job import Cause
from launcher.records import record
from launcher.records.ending import Ending, Outcome
from launcher.train.checkpoints.folders import Checkpoint

ENDINGS = "endings.jsonl"


def add(
    run: str, attempt: int, ending: Ending, signals: Sequence[str], saved: Checkpoint | None
) -> None:
    """Note how an attempt ended; `signals` are those that this launcher was sent, by name.

    attempt: 0 the first; ended: the time (ISO 8601); outcome: finished, stopped or failed; code:
    the launcher's exit code; cause: what the backend says; by: who ended it; checkpoint: the
    newest complete one. Where there is no record, nothing is kept.
    """
    told = {
        "attempt": attempt,
        "ended": datetime.now(timezone.utc).replace(microsecond=0).isoformat(),
        "outcome": ending.outcome.value,
        "code": ending.code,
        "cause": ending.ended.cause.value,
        "reason": ending.reason,
        "by": by(ending, signals),
        "checkpoint": str(saved.folder) if saved else None,
        "iteration": saved.iteration if saved else None,
    }
    with suppress(OSError):
        path = record.folder(run) / ENDINGS
        handle = files.open_own(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with open(handle, "a", encoding="utf-8") as file:
            file.write(json.dumps(told) + "\n")
            file.flush()
            os.fsync(handle)


def by(ending: Ending, signals: Sequence[str]) -> str:
    """Who ended it: the launcher on a signal, another launcher, the engine, …, the run itself."""
    cause = ending.ended.cause
    if cause is not Cause.ITSELF:
        return str(cause.value)
    if signals:
        return f"the launcher, on {', '.join(signals)}"
    if ending.asked:
        return "launcher stop"
    if ending.stalled:
        return "the watchdog"
    return "somebody outside" if ending.outcome is Outcome.STOPPED else "itself"


def endings(run: str) -> list[dict[str, Any]]:
    """How its attempts ended, the first one's first; a line that isn't whole is passed over."""
    try:
        lines = (record.folder(run) / ENDINGS).read_bytes().splitlines()
    except OSError:
        return []
    found = list[dict[str, Any]]()
    for line in lines:
        with suppress(ValueError):
            told = json.loads(line)
            found += [told] if isinstance(told, dict) else []
    return found
