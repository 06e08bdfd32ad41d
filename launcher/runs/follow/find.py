"""Finds runs that were started, on every backend that answers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from launcher.agent.checkpoints import folders, lineage
from launcher.agent.checkpoints.folders import CheckpointFolder
from launcher.base.errors import AbsentError, EngineError, UsageError
from launcher.base.names import LABEL
from launcher.base.settings import expanded
from launcher.runs.backends import backend, names
from launcher.runs.plan.job import Backend, ConnectionLost, Job, goes_on
from launcher.runs.records import record


@dataclass(frozen=True)
class SilentBackends:
    """Backends that can't be asked for their jobs, by their names, and why."""

    names: tuple[str, ...]
    why: EngineError

    def __str__(self) -> str:
        return f"{', '.join(self.names)}: {self.why.problem}"

    @property
    def may_have_jobs(self) -> bool:
        """Whether there is an engine, or one was named."""
        return not isinstance(self.why, AbsentError)


def jobs() -> list[tuple[Backend, Job]]:
    """The jobs of all backends, newest first; a backend that doesn't answer has none."""
    return everywhere()[0]


def everywhere() -> tuple[list[tuple[Backend, Job]], list[SilentBackends]]:
    """The jobs of all backends, newest first, and the backends that don't answer.

    All are asked at once: two of them may wait for the same engine.
    """
    from concurrent.futures import ThreadPoolExecutor

    found, silent = list[tuple[Backend, Job]](), dict[str, SilentBackends]()
    known = names()
    with ThreadPoolExecutor(len(known)) as pool:
        answers = [*pool.map(_ask, known)]
    for name, answer in zip(known, answers, strict=True):
        if isinstance(answer, EngineError):
            same = silent.get(answer.problem, SilentBackends((), answer))
            silent[answer.problem] = SilentBackends((*same.names, name), answer)
        else:
            found += answer
    found.sort(key=lambda pair: pair[1].labels.get(f"{LABEL}created", ""), reverse=True)
    return found, [*silent.values()]


def _ask(name: str) -> list[tuple[Backend, Job]] | EngineError:
    """The jobs of a backend, or why it can't be asked."""
    chosen = backend(name)
    try:
        return [(chosen, job) for job in chosen.jobs()]
    except EngineError as error:
        return error


def job(text: str) -> tuple[Backend, Job]:
    """The job that `text` names: an id, the beginning of one, or a run's name.

    Of several of one name it is the newest of those with a record here. Another user's is named
    by its id alone. Raises UsageError where there is none, and EngineError where there might be
    one on an engine that doesn't answer.
    """
    known, silent = everywhere()
    known.sort(key=lambda pair: not _is_own(pair[1].run))
    listed = [(one.run, one.labels.get(f"{LABEL}name", "")) for _, one in known]
    try:
        run = record.match(text, listed, *_otherwise(text, listed))
    except UsageError as error:
        silent = [one for one in silent if _may_have(one, text)]
        if not silent:
            raise
        raise EngineError(
            f"{error.problem}; these gave no answer: {'; '.join(map(str, silent))}", error.remedy
        ) from error
    if not (run.startswith(text) or _is_own(run)):
        raise UsageError(f"run {run}, called {text}, was started by somebody else", "Give its id.")
    return next(pair for pair in known if pair[1].run == run)


def named(texts: Iterable[str]) -> list[str]:
    """The runs that `texts` name, each pattern as all of this user's jobs whose names fit it."""
    own = (
        [one for _, one in jobs() if _is_own(one.run)] if any(map(record.is_pattern, texts)) else []
    )
    return record.expanded(texts, [(one.run, one.labels.get(f"{LABEL}name", "")) for one in own])


def resumable() -> list[str]:
    """The ids of this user's runs that have ended and left a complete checkpoint, newest first."""
    going_on = {job.run for _, job in jobs() if goes_on(job)}
    return [kept.run for kept in record.records() if kept.run not in going_on and _has_saved(kept)]


def _has_saved(kept: record.Record) -> bool:
    save = kept.config.get("checkpoint", {}).get("save")
    with suppress(OSError, UsageError):
        root = Path(kept.cwd, expanded(save)) if save else None
        return bool(root and folders.newest_complete(root, lineage.of_run(root, kept.run)))
    return False


def lineage_of(labels: Mapping[str, str]) -> str:
    """The line whose checkpoints a job's are, by its labels.

    "" on other nodes than the first, whose launchers know it by another id.
    """
    if labels.get(f"{LABEL}node", "0") != "0":
        return ""
    return labels.get(f"{LABEL}line", labels.get(f"{LABEL}run", ""))


def newest(labels: Mapping[str, str]) -> CheckpointFolder | None:
    """The newest complete checkpoint of a job and what it goes on from. Raises `OSError`."""
    folder = labels.get(f"{LABEL}checkpoints")
    return folders.newest_complete(Path(folder), lineage_of(labels)) if folder else None


def _otherwise(text: str, listed: list[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    """What to say where no job is called so: that the run has ended, or which are the user's."""
    try:
        kept = record.find(text)
    except UsageError:
        own = [pair for pair in listed if _is_own(pair[0])]
        own += [(kept.run, kept.name) for kept in record.records()]
        return "No run is running, and none has ended while no launcher followed it.", own
    return f"It has ended and is removed. To go on with it: launcher resume {kept.run}", []


def _may_have(silent: SilentBackends, text: str) -> bool:
    """Whether the run that `text` names may be on one of them: by its record, where it has one."""
    with suppress(UsageError):
        return record.find(text).backend in silent.names
    return silent.may_have_jobs


def _is_own(run: str) -> bool:
    """Whether the run's record is among this user's."""
    return record.folder(run).is_dir()


def rows(known: list[tuple[Backend, Job]]) -> list[tuple[str, ...]]:
    """What `launcher ps` shows of jobs, each asked at the same time."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda pair: row(pair[1]), known)]


def row(job: Job) -> tuple[str, ...]:
    """What `launcher ps` shows of a job."""
    label = {key.removeprefix(LABEL): value for key, value in job.labels.items()}
    return (
        job.run,
        label.get("name", ""),
        _state(job),
        job.backend,
        label.get("gpus", ""),
        label.get("image", ""),
        label.get("created", ""),
        _saved(job.labels),
    )


def _saved(labels: Mapping[str, str]) -> str:
    """The newest complete checkpoint, as far as this user may look."""
    try:
        found = newest(labels)
    except OSError:
        return "unknown"
    return f"iteration {found.iteration}" if found else ""


def _state(job: Job) -> str:
    try:
        ended = job.ended()
        return job.state() if ended is None else f"ended ({ended.code})"
    except ConnectionLost:
        return "unknown"
