"""Connects a followed run to what keeps its log and metrics, and watches it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from launcher.base.errors import LauncherError
from launcher.runs.follow import guard, live, supervise, watchdog
from launcher.runs.follow.listener import Listener
from launcher.runs.follow.live import tell
from launcher.runs.follow.supervise import attempt_of
from launcher.runs.plan.job import Job
from launcher.runs.records import provenance, record
from launcher.runs.records.metrics import Found
from launcher.runs.records.throughput import Rates
from launcher.runs.records.watch import RecordWatch, Speed


@contextmanager
def listening(job: Job) -> Iterator[Sequence[Listener]]:
    """Keep the job's log and metrics beside its record; nobody listens where there is none."""
    folder = record.folder(job.run)
    if not (folder / record.FILE).is_file():
        yield ()
        return
    record.keep_room(job.run, record.ENDINGS)
    threading.Thread(target=_keep_build, args=(job,), daemon=True).start()
    speed = Speed(record.read(job.run, record.PLAN), record.read(job.run, record.FACTS))
    screen, attempt = live.screen, attempt_of(job)

    def end() -> None:
        supervise.ask(job, "the run", supervise.grace_of(job))

    def seen(found: Found, rates: Rates | None) -> None:
        screen.show(found, rates)
        for one in guards:
            one.see(found)

    with (
        guard.guarding(job, attempt, tell, screen.warn, end) as guards,
        RecordWatch(folder, attempt, speed=speed, seen=seen, tell=tell) as watch,
        watchdog.watching(job, folder, tell) as dogs,
    ):
        yield (watch, *guards, *dogs)


def _keep_build(job: Job) -> None:
    """Keep what the image says it was built of, while its container is there."""
    if (record.folder(job.run) / record.BUILD).exists():
        return
    with suppress(LauncherError, OSError):
        for content in job.files(provenance.IN_IMAGE).values():
            record.put_bytes(job.run, record.BUILD, content)
