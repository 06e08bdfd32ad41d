"""Several nodes as one job: its exit status, the node that failed first, the output of all.

It knows the nodes by their jobs, and not what carries them out.
"""

from __future__ import annotations

import io
import math
import queue
import re
import tarfile
import time
from calendar import timegm
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from time import strptime

from launcher.agent.words import CONCLUSION, REPORT
from launcher.base.names import LABEL
from launcher.runs.plan.job import KILLED, ConnectionLost, ExitStatus, Job, OutputPiece
from launcher.runs.records.ending import RANK_LINE, Ending

POLL_SECONDS = 0.2
SETTLE_SECONDS = 10.0
"""How long nodes that outlive a failed one have to fail, and say why, by themselves."""

LATER = 60.0
"""Seconds by which a node that was ended counts as later than one that failed by itself."""

APART_SECONDS = 5.0
"""Surely more than between a rank's end and the failures of those that miss it."""

FAILED_BY_ITSELF = re.compile(r"rank (\d+) exited")
LOST = "Connection (closed|reset) by peer"
"""In gloo's words, which don't name the rank that writes them."""

STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ", re.MULTILINE)
LONGEST_LINE = 1 << 16
CUT_SHORT = 125


def node_name(rank: int) -> str:
    """What a node is called, in the output and by the other nodes."""
    return f"node-{rank}"


@dataclass(frozen=True)
class NodeState:
    """A node's state. ended_at: seconds since 1970. refused: why it won't start."""

    started: bool
    ended: ExitStatus | None = None
    ended_at: float = 0.0
    refused: str = ""
    paused: bool = False

    @classmethod
    def ended_by_others(cls, code: int = KILLED) -> NodeState:
        """Of one that left no word of its end: whatever the others' was came first."""
        return cls(True, ExitStatus(code), time.time() + LATER)

    @property
    def failed(self) -> bool:
        """Whether the others can't do without it."""
        return bool(self.refused or (self.ended and self.ended.code))


@dataclass
class Survivors:
    """Says when the nodes that outlive a failed one have had time to fail as well."""

    failed_at: float | None = None

    def are_due(self, states: Sequence[NodeState], now: float) -> bool:
        """Whether to end them, at `now` seconds of any clock.

        They can't save, as a checkpoint takes all nodes: so they aren't asked.
        """
        if not any(state.failed for state in states):
            return False
        self.failed_at = now if self.failed_at is None else self.failed_at
        return now - self.failed_at >= SETTLE_SECONDS


@dataclass
class Group:
    """A run's nodes, by their ranks, as one job; a backend adds `look`, `log` and `remove`."""

    nodes: tuple[Job, ...]
    labels: Mapping[str, str]
    _survivors: Survivors = field(default_factory=Survivors, repr=False)

    def look(self) -> list[NodeState]:
        """The states of all nodes. Raises ConnectionLost."""
        raise NotImplementedError

    def log(self, rank: int) -> str:
        """The last lines of a node, each with its time before it; "" where they can't be read."""
        raise NotImplementedError

    def remove(self) -> None:
        """Leave nothing of the nodes."""
        raise NotImplementedError

    @property
    def run(self) -> str:
        return self.labels.get(f"{LABEL}run", "")

    @property
    def handle(self) -> str:
        return self.nodes[0].handle

    def output(self, *, follow: bool = True) -> Iterator[OutputPiece]:
        """What the nodes have written; of several, whole lines, each with its node before it.

        Following it sees to it that nodes that outlive a failed one are ended.
        """
        if len(self.nodes) == 1:
            return self.nodes[0].output(follow=follow)
        outputs = [labelled(rank, self._read(rank, follow)) for rank in range(len(self.nodes))]
        return joined(outputs, self._end_survivors if follow else lambda: None)

    def _read(self, rank: int, follow: bool) -> Iterator[OutputPiece]:
        """A node's output, once it has started; nothing where it won't."""
        while follow and not (states := self.look())[rank].started:
            if group_ended(states, self.log) is not None:
                return
            time.sleep(POLL_SECONDS)
        yield from self.nodes[rank].output(follow=follow)

    def wait(self) -> ExitStatus:
        while (ended := self.ended()) is None:
            self._end_survivors()
            time.sleep(POLL_SECONDS)
        return ended

    def ended(self) -> ExitStatus | None:
        return group_ended(self.look(), self.log)

    def state(self) -> str:
        """A node that is paused holds up all."""
        return "paused" if any(state.paused for state in self.look()) else "running"

    def _end_survivors(self) -> None:
        """End the nodes that go on though one has failed, once they had time to fail as well."""
        if self._survivors.are_due(self.look(), time.monotonic()):
            self.kill()

    def stop(self, grace: int) -> None:
        running = self._running()
        asking = [Thread(target=node.stop, args=(grace,), daemon=True) for node in running]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()

    def kill(self) -> None:
        for node in self._running():
            node.kill()

    def _running(self) -> list[Job]:
        """The nodes that run. Where none was started, as its launcher was killed, all is removed.

        One that still waits for the first one isn't started any more when that one ends.
        """
        with suppress(ConnectionLost):
            states = self.look()
            if not any(state.started or state.refused for state in states):
                self.remove()
            pairs = zip(self.nodes, states, strict=True)
            return [node for node, state in pairs if state.started and not state.ended]
        return []

    def files(self, path: str) -> dict[str, bytes]:
        return self.nodes[0].files(path)

    def diagnose(self) -> dict[str, bytes]:
        """Of all nodes at once: each takes its time."""
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(len(self.nodes)) as pool:
            reports = [*pool.map(lambda node: node.diagnose(), self.nodes)]
        return joined_reports(reports)


def group_ended(states: Sequence[NodeState], log: Callable[[int], str]) -> ExitStatus | None:
    """How the job ended, once no node is left that runs or will; None until then.

    The nodes are in the order of their ranks, and wait for the first one to be ready. `log` gives
    a node's last lines, each with its time before it, "" where they can't be read.
    """
    first = states[0]
    for state in states:
        waits = not state.started and not state.refused and first.ended is None
        if waits or (state.started and state.ended is None):
            return None
    unstarted = [rank for rank, state in enumerate(states) if not state.started]
    refused = [rank for rank in unstarted if states[rank].refused]
    if not refused and (failed := _first_failure(states, log)):
        return failed
    for rank in refused or unstarted:
        why = states[rank].refused or f"{node_name(0)} ended before its port was open"
        return ExitStatus(CUT_SHORT, why=f"{node_name(rank)} didn't start: {why}")
    return ExitStatus(0)


def _first_failure(states: Sequence[NodeState], log: Callable[[int], str]) -> ExitStatus | None:
    """The end of the node whose failure came first, and why, in words that name it."""
    if len(states) == 1:
        return states[0].ended
    logs = {rank: log(rank) for rank, state in enumerate(states) if state.failed}
    if not logs:
        return None
    rank = min(logs, key=lambda rank: failing_since(logs[rank], states[rank].ended_at))
    ended, name = states[rank].ended, node_name(rank)
    assert ended
    reason = Ending(ended, False, STAMP.sub("", logs[rank])).reason
    return replace(ended, why=f"{name}: {reason}" if reason else f"on {name}")


def failing_since(log: str, ended_at: float) -> float:
    """When a node began to fail, to find the first among those that failed because of it.

    By the runner's line on its first rank: nodes may end in another order. A rank that says that it
    lost another one counts as later, and a node that reports another's failure last. A node
    without such a line didn't fail but was ended, and missed by others before its end was seen, so
    that counts as earlier.
    """
    if not (found := RANK_LINE.search(log)):
        return ended_at - APART_SECONDS
    if found[1].startswith("node"):
        return math.inf
    told = FAILED_BY_ITSELF.match(found[1])
    lost = rf"rank {told[1]} has lost another rank|{LOST}" if told else ""
    stamp = STAMP.match(log, log.rfind("\n", 0, found.start()) + 1)
    at = seconds_since_1970(stamp[0].strip()) if stamp else ended_at
    return at + APART_SECONDS if lost and re.search(lost, log[: found.start()]) else at


def seconds_since_1970(text: str) -> float:
    """Of a time such as 2025-01-02T03:04:05.678901234Z, as engines write it."""
    whole, _, fraction = text.removesuffix("Z").partition(".")
    return timegm(strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


@dataclass
class NodeLines:
    """Makes whole lines of pieces, and puts `prefix` before each."""

    prefix: bytes
    begun: dict[bool, bytes] = field(default_factory=lambda: {False: b"", True: b""})

    def add(self, data: bytes, is_error: bool) -> bytes:
        """The lines that are whole by now."""
        lines = (self.begun[is_error] + data).split(b"\n")
        self.begun[is_error] = lines.pop()
        if len(self.begun[is_error]) > LONGEST_LINE:
            lines.append(self.begun[is_error])
            self.begun[is_error] = b""
        return b"".join(self.prefix + line + b"\n" for line in lines)

    def rest(self) -> Iterator[tuple[bool, bytes]]:
        """What has no end of a line."""
        for is_error, line in self.begun.items():
            if line:
                yield is_error, self.prefix + line + b"\n"


def labelled(rank: int, pieces: Iterator[OutputPiece]) -> Iterator[OutputPiece]:
    """A node's output as whole lines, each with the node before it."""
    lines = NodeLines(f"{node_name(rank)} | ".encode())
    for is_error, data, _ in pieces:
        if whole := lines.add(data, is_error):
            yield OutputPiece(is_error, whole, rank)
    for is_error, rest in lines.rest():
        yield OutputPiece(is_error, rest, rank)


def joined(
    outputs: Sequence[Iterator[OutputPiece]], look: Callable[[], None]
) -> Iterator[OutputPiece]:
    """The pieces of all nodes as they come; `look` is called meanwhile. Raises as their outputs."""
    pieces: queue.SimpleQueue[OutputPiece | Exception | None] = queue.SimpleQueue()

    def read(output: Iterator[OutputPiece]) -> None:
        try:
            for piece in output:
                pieces.put(piece)
            pieces.put(None)
        except Exception as error:
            pieces.put(error)

    for output in outputs:
        Thread(target=read, args=(output,), daemon=True).start()
    left, due = len(outputs), time.monotonic()
    while left:
        if time.monotonic() >= due:
            look()
            due = time.monotonic() + POLL_SECONDS
        try:
            piece = pieces.get(timeout=POLL_SECONDS)
        except queue.Empty:
            continue
        if isinstance(piece, Exception):
            raise piece
        if piece is None:
            left -= 1
        else:
            yield piece


def joined_reports(reports: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """The reports of the nodes as one, which ends with what each of them says."""
    if len(reports) == 1:
        return dict(reports[0])
    files, told, said = dict[str, bytes](), list[str](), list[str]()
    for rank, report in enumerate(reports):
        name = node_name(rank)
        files |= {f"{name}.{file}": content for file, content in report.items() if file != REPORT}
        text = report.get(REPORT, b"").decode(errors="replace")
        told.append(f"{name}:\n{text.rstrip()}\n\n")
        lines = [line for line in text.splitlines() if line.startswith(CONCLUSION)]
        said += [f"{name}: {line.removeprefix(CONCLUSION)}" for line in lines[-1:]]
    if said:
        files[REPORT] = f"{''.join(told)}{CONCLUSION}{'; '.join(said)}\n".encode()
    return files


def unpacked(archive: bytes) -> dict[str, bytes]:
    """The regular files of a tar by their names without folders; {} of what is none.

    What is compressed, or has holes, may be far larger than it looks, and isn't read.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as entries:
            regular = [entry for entry in entries if entry.isreg() and not entry.issparse()]
            opened = ((entry.name, entries.extractfile(entry)) for entry in regular)
            return {name.rpartition("/")[2]: file.read() for name, file in opened if file}
    except tarfile.TarError:
        return {}
