"""A run as a Slurm job: submitted, followed by its files, stopped through one, found again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from launcher.base import files, owned
from launcher.base.errors import LauncherError
from launcher.base.names import LABEL
from launcher.base.settings import settings
from launcher.runs.backends import group, host, shown
from launcher.runs.backends.group import NodeLines, NodeState, group_ended, node_name
from launcher.runs.backends.slurm import slurm_queue
from launcher.runs.backends.slurm.slurm_queue import GOES_ON, Queue
from launcher.runs.backends.slurm.slurm_request import OUTPUT, SCRIPT, SlurmRequest
from launcher.runs.plan.job import KILLED, EndCause, ExitStatus, OutputPiece
from launcher.runs.plan.plan import Plan
from launcher.runs.records import record

JOB, CODE, STOP, ASK, HOSTS, EARLY = "slurm.json", "code", "stop", "ask", "hosts", "early"
REPORT_SECONDS = 40.0
"""More than a runner takes for a report of its ranks."""

POLL_SECONDS, FIRST_SECONDS = 0.2, 0.05
"""How often is looked for what nodes wrote; for the first of it, and before, whether they began."""

CHUNK = 1 << 16
TAIL = 1 << 16
ASKED = 143


@dataclass
class SlurmJob(host.FolderJob):
    """A run's job and its files; `requeue` is whether Slurm may start it again."""

    handle: str
    labels: Mapping[str, str]
    requeue: bool = False
    queue: Queue = field(default_factory=Queue, repr=False)

    backend = "slurm"

    @property
    def _nodes(self) -> range:
        return range(int(self.labels.get(f"{LABEL}nodes", "1")))

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        """What the script and the nodes have written; of several nodes, whole lines, named."""
        script = len(self._nodes)
        sources = {(script, True): _NodeOutput(self.folder / OUTPUT)}
        for rank in self._nodes:
            for is_error in (False, True):
                sources[rank, is_error] = _NodeOutput(self._file(rank, is_error))
        try:
            yield from self._pieces(sources, script, follow=follow)
        finally:
            for written in sources.values():
                written.close()

    def _pieces(
        self, sources: Mapping[tuple[int, bool], _NodeOutput], script: int, *, follow: bool
    ) -> Iterator[OutputPiece]:
        lines = {rank: NodeLines(f"{node_name(rank)} | ".encode()) for rank in self._nodes}
        lines[script] = NodeLines(b"job | ")
        begun = False
        while True:
            last = not follow or self.ended() is not None
            begun = begun or (self.folder / OUTPUT).exists()
            idle = True
            for (rank, is_error), written in sources.items() if begun else ():
                if data := written.read():
                    idle = False
                    piece = lines[rank].add(data, is_error) if script > 1 else data
                    if piece:
                        yield OutputPiece(is_error, piece, rank)
            if idle and last:
                break
            if idle:
                state, why = self.queue.state(self.handle)
                if state == "PENDING" and why:
                    self.queue.tell(f"Slurm job {self.handle} waits: {why}")
                some = any(written.at for written in sources.values())
                time.sleep(POLL_SECONDS if some else FIRST_SECONDS)
        for rank, rests in lines.items():
            for is_error, rest in rests.rest():
                yield OutputPiece(is_error, rest, rank)

    def _file(self, rank: int, is_error: bool) -> Path:
        return self.folder / f"{node_name(rank)}.{'err' if is_error else 'out'}"

    def ended(self) -> ExitStatus | None:
        """How it ended, and on which machines."""
        ended = self._ended()
        hosts = _read(self.folder / HOSTS, 0).decode(errors="replace").split() if ended else []
        return replace(ended, hosts=tuple(hosts)) if ended else None

    def _ended(self) -> ExitStatus | None:
        """By the script's last word, or where it could say none, by what Slurm knows of the job."""
        ended = self._said()
        if ended and not (self.requeue and ended.code):
            return ended
        state, why = self.queue.state(self.handle)
        if state in GOES_ON:  # of a node that failed, the script says so before it is requeued
            return None
        if ended := self._said():
            return ended
        if not state:
            return ExitStatus(KILLED, EndCause.REMOVED)
        cause = EndCause.MEMORY if state == "OUT_OF_MEMORY" else EndCause.ITSELF
        if state == "COMPLETED" and (self.folder / OUTPUT).exists():  # it couldn't write its code
            return ExitStatus(0)
        code = ASKED if state.startswith("CANCELLED") else KILLED
        words = f"Slurm ended job {self.handle}: {state}"
        words += f" ({why})" if why else ""
        if state in ("COMPLETED", "FAILED") and not (self.folder / OUTPUT).exists():
            words += f"; its nodes don't see {self.folder}: let LAUNCHER_RUNS name a shared disk"
        return ExitStatus(code, cause, words)

    def _said(self) -> ExitStatus | None:
        code = host.number(self.folder / CODE)
        if code is None:
            return None
        if not (code and any(self._end(rank).exists() for rank in self._nodes)):
            return ExitStatus(code)
        found = group_ended([self._state(rank) for rank in self._nodes], self._log)
        return found if found and found.code else ExitStatus(code)

    def _end(self, rank: int) -> Path:
        return self.folder / f"{node_name(rank)}.end"

    def _state(self, rank: int) -> NodeState:
        """Of a node, once all have ended: one that wrote no end was ended by the others'.

        One that wrote nothing never began: its container didn't start, or Slurm's step there.
        """
        with suppress(OSError, ValueError):
            if not (told := _read(self._end(rank), 0).split()):
                why = self._log(rank).strip().rpartition("\n")[2]
                return NodeState(False, refused=why or "Slurm's reason is above")
            code, at = told[-2:]
            return NodeState(True, ExitStatus(int(code)), float(at))
        return NodeState.ended_by_others()

    def _log(self, rank: int) -> str:
        """A node's last lines."""
        text = ""
        for is_error in (False, True):
            path = self._file(rank, is_error)
            with suppress(OSError):
                at = max(0, path.stat().st_size - TAIL)
                text += _read(path, at).decode(errors="replace")
        return text

    def state(self) -> str:
        state, _ = self.queue.state(self.handle)
        return {"PENDING": "pending", "SUSPENDED": "paused"}.get(state, "running")

    def stop(self, grace: int) -> None:
        """Ask by a file that the nodes look for; one that still waits in the queue is taken out."""
        self.queue.forget()  # it may have started since, and is to save
        if self.queue.state(self.handle)[0] == "PENDING":
            return self.kill()
        super().stop(grace)

    def ask(self) -> None:
        try:
            files.write(self.folder / STOP, "")
        except OSError as error:
            host.tell(f"can't write {self.folder / STOP}: {error.strerror}; calling scancel")
            self.kill()

    def kill(self) -> None:
        slurm_queue.cancel(self.handle)
        self.queue.forget()

    def remove(self) -> None:
        if self.ended() is None:
            self.kill()
            self.wait()
        names = [JOB, SCRIPT, CODE, STOP, ASK, HOSTS, EARLY, OUTPUT]
        names += [f"{node_name(n)}.{end}" for n in self._nodes for end in ("out", "err", "end")]
        for mark in ("limit-", "failed-"):
            found = (path.name for path in self.folder.glob(f"{mark}*"))
            names += [name for name in found if name.removeprefix(mark).isdecimal()]
        _remove(self.folder, names)

    def diagnose(self) -> dict[str, bytes]:
        """Of all nodes at once, by a question in a file that each answers in its own."""
        question = str(time.time_ns())
        files.write(self.folder / ASK, f"{question}\n")
        answers = [self.folder / f"{node_name(rank)}.{question}.tar" for rank in self._nodes]
        until = time.monotonic() + REPORT_SECONDS
        while not all(path.exists() for path in answers) and time.monotonic() < until:
            if self.ended() is not None:
                break
            time.sleep(POLL_SECONDS)
        reports = [group.unpacked(path.read_bytes()) if path.exists() else {} for path in answers]
        for path in answers:
            owned.remove_file(path, self.folder, missing_ok=True)
        return group.joined_reports(reports)


def _remove(folder: Path, names: Sequence[str]) -> None:
    """Remove files of a run's folder; where the disk takes no change, a line says so."""
    try:
        for name in names:
            owned.remove_file(folder / name, folder, missing_ok=True)
    except OSError as error:
        host.tell(f"Slurm's files of run {folder.name} stay in {folder}: {error.strerror}")


class _NodeOutput:
    """A file that a node writes: its rest can still be read once another launcher removed it."""

    def __init__(self, path: Path) -> None:
        self.path, self.at = path, 0
        self._file: IO[bytes] | None = None

    def read(self) -> bytes:
        """The next piece, b"" where there is none yet.

        It is opened anew each time, since a shared disk shows what is new to who opens it.
        """
        with suppress(FileNotFoundError):
            opened = self.path.open("rb")
            self.close()
            self._file = opened
        if self._file is None:
            return b""
        self._file.seek(self.at)
        data = self._file.read(CHUNK)
        self.at += len(data)
        return data

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _read(path: Path, at: int) -> bytes:
    """A piece of a file from `at` on; b"" where there is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(CHUNK)
    except FileNotFoundError:
        return b""


def submit(
    plans: Mapping[int, Plan],
    asked: Mapping[int, SlurmRequest],
    named: Sequence[str],
    given: str = "",
) -> list[SlurmJob]:
    """The runs of one job, whose script is named; or given, of an array: a run for each number.

    Raises EngineError, and leaves nothing, where Slurm refuses it.
    """
    secret = shown.secrets(next(iter(plans.values())))
    try:
        for number, plan in plans.items():
            record.make(plan.run)
            files.write(Path(asked[number].path), asked[number].script, 0o700)
        job = slurm_queue.submit(*named, env=os.environ | secret, given=given)
    except LauncherError:
        for plan in plans.values():
            _remove(record.folder(plan.run), [SCRIPT])
        raise
    found = list[SlurmJob]()
    for number, plan in plans.items():
        handle, again = f"{job}_{number}" if given else job, asked[number].requeue
        found.append(SlurmJob(record.folder(plan.run), handle, dict(plan.labels), again))
        kept = {"job": handle, "labels": dict(plan.labels), "requeue": again}
        files.write(found[-1].folder / JOB, json.dumps(kept), 0o600)
    return found


def jobs() -> list[SlurmJob]:
    """The jobs that a launcher submitted and nobody has removed, newest first."""
    queue, found = Queue(), list[SlurmJob]()
    for path in settings().runs.glob(f"*/{JOB}"):
        with suppress(OSError, ValueError, KeyError):  # another version's
            told = json.loads(path.read_text(encoding="utf-8"))
            known = str(told["job"]), dict(told["labels"]), bool(told.get("requeue"))
            found.append(SlurmJob(path.parent, *known, queue))
    return host.newest_first(found)
