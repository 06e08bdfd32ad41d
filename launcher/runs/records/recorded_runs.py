"""Lists, filters, shows and prunes recorded runs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from launcher.agent.words import COSTS
from launcher.base import owned
from launcher.base.errors import UsageError
from launcher.base.settings import runs_folder
from launcher.runs.plan.job import EndCause, ExitStatus, Job, goes_on
from launcher.runs.plan.mounts import PROFILE
from launcher.runs.records import owner, record
from launcher.runs.records.record import Record

RUNNING, PAUSED, UNKNOWN = "running", "paused", "unknown"
STATES = (RUNNING, PAUSED, "finished", "stopped", "failed", UNKNOWN)
"""Unknown: the run ended with nobody following it, or its engine doesn't answer."""

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
TAIL = 1 << 16
"""Bytes at the end of the metrics in which the last step is looked for."""


@dataclass(frozen=True)
class RunSummary:
    """What a list says of a run.

    `loss` is the last one logged, at `iteration`; `why` are the reason that it ended, who ended it
    where it didn't by itself, and what its log says of a failure; `saved` is its newest complete
    checkpoint.
    """

    run: str
    name: str
    state: str
    code: int | None
    created: str
    ended: str
    backend: str
    image: str
    iteration: int | None
    loss: float | None
    folder: str
    why: tuple[str, ...] = ()
    saved: str = ""


def known(jobs: Iterable[Job]) -> list[RunSummary]:
    """The runs that have a record, newest first; `jobs` are those that backends know of."""
    alive = living(jobs)
    runs = runs_folder()  # looked up once, and not for each of thousands
    found = [
        summary(kept, folder := f"{runs}/{kept.run}", alive, _last_step(folder))
        for kept in record.each()
    ]
    return sorted(found, key=lambda run: run.created, reverse=True)


def living(jobs: Iterable[Job]) -> dict[str, str]:
    """The states of the runs that go on, by their ids."""
    return {job.run: PAUSED if job.state() == PAUSED else RUNNING for job in jobs if goes_on(job)}


def summary(
    kept: Record, folder: str, alive: Mapping[str, str], last: Mapping[str, Any], image: str = ""
) -> RunSummary:
    """A run's summary; `last` is its newest step, `image` is read from its facts if not given."""
    ending = _last_ending(folder)
    over = ending if kept.run not in alive else None
    outcome = ending["outcome"] if ending else UNKNOWN
    return RunSummary(
        run=kept.run,
        name=kept.name,
        state=alive.get(kept.run, outcome),
        code=over["code"] if over else None,
        created=kept.created,
        ended=over["ended"] if over else "",
        backend=kept.backend,
        image=image or record.image_name(f"{folder}/{record.FACTS}"),
        iteration=max(
            filter(None, (last.get("iteration"), (over or {}).get("iteration"))), default=None
        ),
        loss=last.get("loss"),
        folder=folder,
        why=_why(over or {}),
        saved=(ending or {}).get("checkpoint") or "",
    )


def _why(ending: Mapping[str, Any]) -> tuple[str, ...]:
    """Why an attempt ended; () of one that was done."""
    if ending.get("outcome") in (None, "finished"):
        return ()
    by = ending.get("by", "itself")
    found = ending.get("reason"), "" if by == "itself" else f"ended by {by}"
    return tuple(filter(None, (*found, *ending.get("clues", ()))))


def _last_ending(folder: str | Path) -> dict[str, Any] | None:
    """How the last attempt ended; None where it isn't known, as of one that goes on."""
    ending = next(record.newest_lines(f"{folder}/{record.ENDINGS}", TAIL), None)
    begun = record.log_name(ending["attempt"] + 1) if ending else ""
    return None if begun and os.path.exists(f"{folder}/{begun}") else ending


def ended(run: str, attempt: int) -> ExitStatus | None:
    """How an attempt of a run ended, as a launcher noted that followed it; None where none did."""
    for told in record.read_lines(record.folder(run) / record.ENDINGS):
        with suppress(KeyError, TypeError, ValueError):
            if told["attempt"] == attempt:
                return ExitStatus(int(told["code"]), EndCause(told["cause"]))
    return None


def cause(text: str) -> EndCause:
    """What ended a run, named by id or name; `EndCause.ITSELF` where nothing is kept of it."""
    with suppress(UsageError, KeyError, ValueError):
        return EndCause((_last_ending(record.folder(record.find(text).run)) or {})["cause"])
    return EndCause.ITSELF


def outcome(text: str) -> str:
    """How a run ended: finished, stopped or failed; unknown where nothing is kept of it."""
    with suppress(UsageError):
        ending = _last_ending(record.folder(record.find(text).run)) or {}
        return str(ending.get("outcome", UNKNOWN))
    return UNKNOWN


def _last_step(folder: str) -> Mapping[str, Any]:
    """The newest step among the metrics' last lines."""
    lines = record.newest_lines(f"{folder}/{record.METRICS}", TAIL)
    return next((found for found in lines if found.get("kind") == "step"), {})


@dataclass(frozen=True)
class Filter:
    """Which runs are meant: each that is given has to fit.

    name: a pattern of it; since, before: those that were created after or before that time.
    """

    states: tuple[str, ...] = ()
    name: str | None = None
    since: datetime | None = None
    before: datetime | None = None

    def takes(self, run: RunSummary) -> bool:
        """Whether the run is one of them."""
        if self.states and run.state not in self.states:
            return False
        if self.name is not None and not record.fits(run.name, self.name):
            return False
        created = datetime.fromisoformat(run.created)
        return (self.since or created) <= created and (not self.before or created < self.before)


def ago(text: str, now: datetime | None = None) -> datetime:
    """The time that lies an age like 30m, 12h, 7d or 2w back. Raises UsageError."""
    told = re.fullmatch(r"(\d{1,5})([mhdw])", text)
    if not told:
        raise UsageError(f"{text!r} is no age", "For example 30m, 12h, 7d or 2w.")
    back = timedelta(**{UNITS[told[2]]: int(told[1])})
    return (now or datetime.now(timezone.utc)) - back


def to_prune(found: Iterable[RunSummary], wanted: Filter, keep: int) -> list[RunSummary]:
    """The runs whose records may go: ended, taken by `wanted`, and not the newest `keep` of them.

    Those of which it isn't known whether they ended only where `wanted` says so.
    """
    stays = {RUNNING, PAUSED, UNKNOWN} - {state for state in wanted.states if state == UNKNOWN}
    taken = [run for run in found if wanted.takes(run)]
    return [run for run in taken[keep:] if run.state not in stays]


def prune(run: RunSummary) -> int | None:
    """Remove a run's record, log and metrics; the bytes that it freed, None where it is followed.

    Checkpoints are the user's own, and stay. Raises UsageError where it can't be removed.
    """
    folder = record.folder(run.run)
    with owner.following(run.run) as nobody:
        if not nobody:
            return None
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        try:
            owned.remove_folder(folder, record.folder(run.run).parent)
        except OSError as error:
            raise UsageError(f"{folder} can't be removed: {error.strerror}") from error
    return size


def _profile(plan: Mapping[str, Any] | None) -> list[Any]:
    """What the traces of a run show, rank by rank; [] where it has none, or none is seen here."""
    mounts = plan["mounts"] if plan else ()
    folders = [Path(mount["source"]) for mount in mounts if mount["key"] == PROFILE]
    found = [path for folder in folders for path in sorted(folder.glob(COSTS.format("*")))]
    return [one for path in found for one in record.read_lines(path)]


def shown(text: str) -> dict[str, Any]:
    """All that is kept of the run that `text` names. Raises UsageError where there is none."""
    kept = record.find(text)
    facts = record.read(kept.run, record.FACTS) or {}
    return {
        "run": kept.run,
        "name": kept.name,
        "created": kept.created,
        "backend": kept.backend,
        "file": kept.file,
        "folder": str(record.folder(kept.run)),
        "given": kept.config,
        "resolved": facts.pop("config", None),
        "plan": record.read(kept.run, record.PLAN),
        "build": record.read(kept.run, record.BUILD),
        **facts,
        "profile": _profile(record.read(kept.run, record.PLAN)),
        "endings": [*record.read_lines(record.folder(kept.run) / record.ENDINGS)],
    }
