"""A run of several nodes as one job: their output together, how it ended, who is ended with it.

Knows the nodes by their jobs, and what is told of each as a `State`; not what carries them out.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from calendar import timegm
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import strptime

from launcher.names import LABEL
from launcher.plan.job import Ended, Job, Lost
from launcher.records.ending import RANK_LINE, Ending
from launcher.train.words import CONCLUSION, REPORT

POLL_SECONDS = 0.2
SETTLE_SECONDS = 10.0
"""How long nodes that outlive a failed one have to fail, and say why, by themselves."""

APART_SECONDS = 5.0
"""Surely more than between a rank's end and the failures of those that miss it."""

FAILED_BY_ITSELF = re.compile(r"rank (\d+) exited")
LOST = "Connection (closed|reset) by peer"
"""In gloo's words, which don't tell the rank that says so."""

STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+Z ", re.MULTILINE)
LONGEST_LINE = 1 << 16

CUT_SHORT = 125

Piece = tuple[str, bool, bytes]
"""A node's handle, whether it wrote to stderr, and what: whole lines."""


@dataclass(frozen=True)
class State:
    """What is known of a node.

    `at` is when it ended, in seconds since 1970; `refused` is why it won't be started.
    """

    started: bool
    ended: Ended | None
    at: float = 0.0
    refused: str = ""
    unhealthy: bool = False
    paused: bool = False


def node_name(rank: int) -> str:
    """What a node is called, in its output as well."""
    return f"node-{rank}"


@dataclass
class Group:
    """A run's nodes, in the order of their ranks, of which the first is waited for by the others.

    A backend adds how it asks: `look` and `log`.
    """

    nodes: tuple[Job, ...]
    labels: Mapping[str, str]
    _late: str = field(default="", repr=False)
    _failed_at: float | None = field(default=None, repr=False)

    def look(self, node: Job) -> State:
        """The state of a node. Raises Lost."""
        raise NotImplementedError

    def log(self, node: Job) -> str:
        """The last lines of a node, each with its time before it; none where they can't be read."""
        raise NotImplementedError

    def remove(self) -> None:
        """Leave nothing of the nodes."""
        raise NotImplementedError

    @property
    def handle(self) -> str:
        return self.nodes[0].handle

    @property
    def run(self) -> str:
        return self.labels.get(f"{LABEL}run", "")

    def output(self, *, follow: bool = True) -> Iterator[tuple[bool, bytes]]:
        """What the nodes have written; of several, whole lines, each with its node before it.

        Following it sees to it that nodes that outlive a failed one are ended.
        """
        if len(self.nodes) == 1:
            yield from self.nodes[0].output(follow=follow)
            return
        passed = _passed.setdefault(self.run, Passed())
        passed.begin_again()
        for piece in self._pieces(follow):
            yield from passed.of(*piece)
        yield from passed.held()

    def _pieces(self, follow: bool) -> Iterator[Piece]:
        """The lines of all nodes as they come. Raises Lost."""
        pieces: queue.SimpleQueue[Piece | Exception | None] = queue.SimpleQueue()
        for rank in range(len(self.nodes)):
            threading.Thread(target=self._read, args=(rank, follow, pieces), daemon=True).start()
        left, look = len(self.nodes), time.monotonic()
        while left:
            if follow and time.monotonic() >= look:
                self._end_survivors(self._states())
                look = time.monotonic() + POLL_SECONDS
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

    def _read(
        self, rank: int, follow: bool, pieces: queue.SimpleQueue[Piece | Exception | None]
    ) -> None:
        """Put a node's lines into the queue, then None; or what went wrong."""
        handle = self.nodes[rank].handle
        try:
            if not follow or self._is_started(rank):
                lines = Lines(f"{node_name(rank)} | ".encode())
                for is_error, data in self.nodes[rank].output(follow=follow):
                    if whole := lines.add(data, is_error):
                        pieces.put((handle, is_error, whole))
                for is_error, rest in lines.rest():
                    pieces.put((handle, is_error, rest))
            pieces.put(None)
        except Exception as error:
            pieces.put(error)

    def _is_started(self, rank: int) -> bool:
        """Wait until a node has started; False where it won't."""
        while not (states := self._states())[rank].started:
            if self._decided(states) is not None:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def wait(self) -> Ended:
        while (ended := self.ended()) is None:
            self._end_survivors(self._states())
            time.sleep(POLL_SECONDS)
        return ended

    def ended(self) -> Ended | None:
        return self._decided(self._states())

    def state(self) -> str:
        """A node that is paused holds up all."""
        return "paused" if any(state.paused for state in self._states()) else "running"

    def _states(self) -> list[State]:
        """The states of all nodes; those that wait for one that isn't ready in time never start."""
        states = [self.look(node) for node in self.nodes]
        if states[0].unhealthy and not states[0].ended:  # one that has ended is so, too
            self._late = f"{node_name(0)} didn't open its port in time"
        return [
            one if one.started or one.refused else replace(one, refused=self._late)
            for one in states
        ]

    def _decided(self, states: list[State]) -> Ended | None:
        """How the run ended, once no node is left that runs or will."""
        first = states[0]
        for state in states:
            waits = not state.started and not state.refused and first.ended is None
            if waits or (state.started and state.ended is None):
                return None
        unstarted = [rank for rank, state in enumerate(states) if not state.started]
        refused = [rank for rank in unstarted if states[rank].refused]
        if not refused and (failed := self._first_failure(states)):
            return failed
        for rank in refused or unstarted:
            why = states[rank].refused or f"{node_name(0)} ended before its port was open"
            return Ended(CUT_SHORT, why=f"{node_name(rank)} didn't start: {why}")
        return Ended(0)

    def _first_failure(self, states: list[State]) -> Ended | None:
        """The end of the node whose failure came first, and why, in words that name it."""
        if len(states) == 1:
            return states[0].ended
        failed = {r: one for r, one in enumerate(states) if one.ended and one.ended.code}
        logs = {rank: self.log(self.nodes[rank]) for rank in failed}
        if not failed:
            return None
        rank = min(failed, key=lambda rank: failing_since(logs[rank], failed[rank].at))
        ended, name = failed[rank].ended, node_name(rank)
        assert ended
        reason = Ending(ended, False, STAMP.sub("", logs[rank])).reason
        return replace(ended, why=f"{name}: {reason}" if reason else f"on {name}")

    def _end_survivors(self, states: list[State]) -> None:
        """End the nodes that go on though one has failed, once they had time to fail as well.

        They can't save: a checkpoint takes all nodes. So they aren't asked, they are ended.
        """
        if not any((state.ended and state.ended.code) or state.refused for state in states):
            return
        self._failed_at = self._failed_at or time.monotonic()
        if time.monotonic() - self._failed_at >= SETTLE_SECONDS:
            self.kill()

    def stop(self, grace: int) -> None:
        asking = [
            threading.Thread(target=node.stop, args=(grace,), daemon=True)
            for node in self._started()
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()

    def kill(self) -> None:
        for node in self._started():
            node.kill()

    def _started(self) -> list[Job]:
        """The nodes that run. Where none was started, as its launcher was killed, all is removed.

        One that still waits for the first one isn't started any more when that one ends.
        """
        with suppress(Lost):
            states = self._states()
            if not any(state.started or state.refused for state in states):
                self.remove()
            pairs = zip(self.nodes, states, strict=True)
            return [node for node, state in pairs if state.started and not state.ended]
        return []

    def files(self, path: str) -> dict[str, bytes]:
        return self.nodes[0].files(path)

    def diagnose(self) -> dict[str, bytes]:
        """Of all nodes at once: each takes its time."""
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            reports = [*pool.map(lambda node: node.diagnose(), self.nodes)]
        return reports[0] if len(reports) == 1 else merged(reports)


def merged(reports: Sequence[Mapping[str, bytes]]) -> dict[str, bytes]:
    """The reports of several nodes as one, which ends with what each of them says."""
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


def failing_since(log: str, ended: float) -> float:
    """When a node began to fail, to tell the first from those that failed for want of it.

    By the runner's line on its first rank: nodes may end in another order. A rank that says that it
    lost another one counts as later. A node without such a line didn't fail but was ended, and
    missed by others before the engine had seen its end, so that counts as earlier.
    """
    if not (found := RANK_LINE.search(log)):
        return ended - APART_SECONDS
    told = FAILED_BY_ITSELF.match(found[1])
    lost = rf"rank {told[1]} has lost another rank|{LOST}" if told else ""
    stamp = STAMP.match(log, log.rfind("\n", 0, found.start()) + 1)
    at = seconds(stamp[0].strip()) if stamp else ended
    return at + APART_SECONDS if lost and re.search(lost, log[: found.start()]) else at


def seconds(time: str) -> float:
    """Seconds since 1970 of a time in the engine's words: 2025-01-02T03:04:05.678901234Z."""
    whole, _, fraction = time.removesuffix("Z").partition(".")
    return timegm(strptime(whole, "%Y-%m-%dT%H:%M:%S")) + float(f"0.{fraction or 0}")


class Passed:
    """What this process has passed on of a run's nodes, for when the engine was lost meanwhile.

    A new reader gets all of it from the beginning, in another order. It passes on first what was
    passed on before, as who follows the run knows only how many bytes of each stream that was.
    """

    def __init__(self) -> None:
        self.given: dict[tuple[str, bool], int] = {}
        self.before: dict[tuple[str, bool], int] = {}
        self.waiting: list[Piece] = []

    def begin_again(self) -> None:
        """Read all nodes from the beginning."""
        self.before, self.given, self.waiting = self.given, {}, []

    def of(self, container: str, is_error: bool, data: bytes) -> Iterator[tuple[bool, bytes]]:
        """What may be passed on by now, with a piece that has come."""
        key = container, is_error
        old = min(self.before.get(key, 0), len(data))
        if old:
            self.before[key] -= old
            yield self._give(container, is_error, data[:old])
        if data[old:]:
            self.waiting.append((container, is_error, data[old:]))
        if not any(self.before.values()):
            yield from self.held()

    def held(self) -> Iterator[tuple[bool, bytes]]:
        """What has waited."""
        waiting, self.waiting = self.waiting, []
        for piece in waiting:
            yield self._give(*piece)

    def _give(self, container: str, is_error: bool, data: bytes) -> tuple[bool, bytes]:
        key = container, is_error
        self.given[key] = self.given.get(key, 0) + len(data)
        return is_error, data


_passed: dict[str, Passed] = {}


@dataclass
class Lines:
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
