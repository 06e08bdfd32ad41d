"""Finds runs that were started, on every backend that answers."""

from __future__ import annotations

from pathlib import Path

from launcher.backends import BACKENDS, Backend, Job, Lost, backend
from launcher.errors import EngineError
from launcher.run import record
from launcher.run.image import LABEL
from launcher.train import folders


def jobs() -> list[tuple[Backend, Job]]:
    """The jobs of all backends, newest first; a backend that doesn't answer has none."""
    found = []
    for name in BACKENDS:
        chosen = backend(name)
        try:
            found += [(chosen, job) for job in chosen.jobs()]
        except (EngineError, Lost):
            continue
    return sorted(found, key=lambda pair: pair[1].labels.get(f"{LABEL}created", ""), reverse=True)


def job(text: str) -> tuple[Backend, Job]:
    """The job that `text` names: an id, the beginning of one, or a run's name.

    Raises UsageError where there is none, and EngineError where there might be one on an engine
    that doesn't answer.
    """
    known = jobs()
    listed = [(one.run, one.labels.get(f"{LABEL}name", "")) for _, one in known]
    if not known:
        for name in BACKENDS:
            backend(name).jobs()
    run = record.match(text, listed)
    return next(pair for pair in known if pair[1].run == run)


def row(job: Job) -> tuple[str, ...]:
    """What `launcher ps` tells of a job."""
    label = {key.removeprefix(LABEL): value for key, value in job.labels.items()}
    ended = job.ended()
    saved = label.get("checkpoints")
    newest = folders.newest_complete(Path(saved)) if saved else None
    return (
        job.run,
        label.get("name", ""),
        "running" if ended is None else f"ended ({ended.code})",
        job.backend,
        label.get("gpus", ""),
        label.get("image", ""),
        label.get("created", ""),
        f"iteration {newest.iteration}" if newest else "",
    )
