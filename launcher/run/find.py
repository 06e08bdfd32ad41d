"""Finds runs that were started, on every backend that answers."""

from __future__ import annotations

from pathlib import Path

from launcher.backends import BACKENDS, Backend, Job, Lost, backend
from launcher.errors import EngineError, UsageError
from launcher.run import record
from launcher.run.image import LABEL
from launcher.train import folders


def jobs() -> list[tuple[Backend, Job]]:
    """The jobs of all backends, newest first; a backend that doesn't answer has none."""
    return _ask_all()[0]


def _ask_all() -> tuple[list[tuple[Backend, Job]], list[str]]:
    """The jobs of all backends, newest first, and why those that don't answer don't."""
    found, silent = list[tuple[Backend, Job]](), list[str]()
    for name in BACKENDS:
        chosen = backend(name)
        try:
            found += [(chosen, job) for job in chosen.jobs()]
        except EngineError as error:
            silent.append(f"{name}: {error.problem}")
        except Lost as error:
            silent.append(f"{name}: {error}")
    found.sort(key=lambda pair: pair[1].labels.get(f"{LABEL}created", ""), reverse=True)
    return found, silent


def job(text: str) -> tuple[Backend, Job]:
    """The job that `text` names: an id, the beginning of one, or a run's name.

    Raises UsageError where there is none, and EngineError where there might be one on an engine
    that doesn't answer.
    """
    known, silent = _ask_all()
    try:
        run = record.match(
            text, [(one.run, one.labels.get(f"{LABEL}name", "")) for _, one in known]
        )
    except UsageError as error:
        if not silent:
            raise
        raise EngineError(
            f"{error.problem}, and not all was asked: {'; '.join(silent)}", error.remedy
        ) from error
    return next(pair for pair in known if pair[1].run == run)


def row(job: Job) -> tuple[str, ...]:
    """What `launcher ps` tells of a job."""
    label = {key.removeprefix(LABEL): value for key, value in job.labels.items()}
    saved = label.get("checkpoints")
    newest = folders.newest_complete(Path(saved)) if saved else None
    return (
        job.run,
        label.get("name", ""),
        _state(job),
        job.backend,
        label.get("gpus", ""),
        label.get("image", ""),
        label.get("created", ""),
        f"iteration {newest.iteration}" if newest else "",
    )


def _state(job: Job) -> str:
    try:
        ended = job.ended()
    except Lost:
        return "unknown"
    return "running" if ended is None else f"ended ({ended.code})"
