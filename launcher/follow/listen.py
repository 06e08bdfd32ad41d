"""Who listens to a run that is followed: what keeps its log and its metrics."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from launcher.errors import LauncherError
from launcher.follow import supervise, watchdog
from launcher.follow.supervise import Listener, attempt_of, tell
from launcher.plan.job import Job
from launcher.records import metrics, provenance, record, throughput
from launcher.records.metrics import Step
from launcher.records.throughput import Rates
from launcher.records.watch import Watch


@contextmanager
def listening(job: Job) -> Iterator[Sequence[Listener]]:
    """Keep the job's log and metrics beside its record; nobody listens where there is none."""
    folder = record.folder(job.run)
    if not (folder / record.FILE).is_file():
        yield ()
        return
    threading.Thread(target=_keep_build, args=(job,), daemon=True).start()
    speed = Speed(record.read(job.run, record.PLAN), record.read(job.run, record.FACTS))
    show = supervise.screen.show
    with (
        Watch(folder, attempt_of(job), speed=speed, seen=show, tell=tell) as watch,
        watchdog.watching(job, folder, tell) as dogs,
    ):
        yield (watch, *dogs)


def _keep_build(job: Job) -> None:
    """Keep what the image says it was built of, while its container is there."""
    if (record.folder(job.run) / record.BUILD).exists():
        return
    with suppress(LauncherError, OSError):
        for content in job.files(provenance.IN_IMAGE).values():
            record.put_bytes(job.run, record.BUILD, content)


class Speed:
    """Tells how fast a step was, from the plan's sizes and what the log says of the vocabulary."""

    def __init__(self, plan: dict[str, Any] | None, facts: dict[str, Any] | None) -> None:
        self.plan, self.gpu = plan, _gpu(facts)
        self.step = throughput.step_of(plan) if plan else None

    def read(self, line: str) -> None:
        """Take the padded vocabulary from the line that tells it."""
        if self.plan and (size := metrics.padded_vocabulary(line)):
            self.step = throughput.step_of(self.plan, size)

    def of(self, step: Step) -> Rates | None:
        """The rates of a step; None where the model isn't known."""
        if self.step is None:
            return None
        batch = step.global_batch_size or self.step.batch
        return throughput.rates(replace(self.step, batch=batch), step.ms_per_step, self.gpu)


def _gpu(facts: dict[str, Any] | None) -> str | None:
    """The name of the machine's GPUs, where they have one name."""
    machine = facts and facts["machine"]
    names = {gpu["name"] for gpu in machine["gpus"] or ()} if machine else set()
    return names.pop() if len(names) == 1 else None
