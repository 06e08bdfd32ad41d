"""Finds which rank of a stalled run waits where, from stacks and flight records."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import takewhile
from pathlib import Path

from launcher.agent.ranks import stacks
from launcher.agent.ranks.stacks import Frame, Stack
from launcher.agent.stall import flight
from launcher.agent.words import CONCLUSION, REPORT, REPORTS
from launcher.base import files

ANSWER_SECONDS = 5.0
"""How long all ranks have to write their stacks; a rank that can takes milliseconds."""

QUIET_SECONDS = 0.2
"""After this long without a new byte, a rank's stacks are taken for whole."""

RECORD_SECONDS = 5.0
"""How long torch has to write a flight record: its monitor looks for requests once a second."""

REPORT_SECONDS = 30.0
"""How long who asked for a report waits for it: longer than the runner takes."""

RUNNERS = (
    b"launcher/agent/start.py runner",
    b"-m launcher.agent.runner",
    b"-m launcher.train.runner",
)
"""How the command line of a runner goes on behind Python's own word; the last is an older one."""

COLLECTIVES = re.compile(
    r"/torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional|rendezvous)\.py$"
)
"""The files whose functions wait for other ranks."""

POINT_TO_POINT = ("send", "recv", "send_object_list", "recv_object_list", "batch_isend_irecv")
PIPELINE = "p2p_communication.py"
"""Megatron's file that waits for sends and receives which it started before."""

WAIT = re.compile(r"[\w.\[\]()]+\.wait\(")
"""A wait whose function is written in C, since its caller is the innermost frame."""

DEVICE = re.compile(r"\.(?:item|tolist|cpu|synchronize|nonzero)\(")


class Activity(Enum):
    """What a rank is doing: the words for one rank, and for several."""

    COLLECTIVE = ("waits in", "wait in")
    POINT_TO_POINT = ("waits for one rank in", "wait for one rank in")
    DEVICE = ("waits for its GPU in", "wait for their GPUs in")
    ELSEWHERE = ("is in", "are in")
    SILENT = ("doesn't answer:", "don't answer:")


@dataclass(frozen=True)
class RankPosition:
    """Where a rank is: in `what` at `frame`, come from `caller`, the program's innermost line.

    `source` is the text of that line, as far as it can be read, and no collective is waited in.
    `pending` is what its GPU has to do first, where that is known.
    """

    kind: Activity
    what: str
    frame: Frame | None = None
    caller: Frame | None = None
    source: str = ""
    pending: str = ""

    @property
    def key(self) -> tuple[Activity, str]:
        """What ranks have in common that are there; without the line of a library."""
        short = self._from or not self.frame
        return self.kind, f"{self.what}{self._from}{self.pending}" if short else self.told

    @property
    def told(self) -> str:
        """The place in words, which `kind` goes before."""
        at = f"{self.what} ({self.frame.place}){self._from}" if self.frame else self.what
        return f"{at}: {self.source}{self.pending}" if self.source else f"{at}{self.pending}"

    @property
    def _from(self) -> str:
        return f", from {self.caller.place}" if self.caller and self.caller != self.frame else ""


def place(stack: Stack) -> RankPosition:
    """Where a rank is, by its main thread's stack."""
    if not stack:
        return RankPosition(Activity.ELSEWHERE, "no Python function")
    within = [*takewhile(lambda frame: frame.is_library, stack)]
    caller = stack[len(within)] if len(within) < len(stack) else None
    for frame in reversed(within):  # the outermost is what the program called
        if COLLECTIVES.search(frame.file) and frame.function != "<module>":
            single = frame.function in POINT_TO_POINT
            kind = Activity.POINT_TO_POINT if single else Activity.COLLECTIVE
            return RankPosition(kind, frame.function, frame, caller)
    text = linecache.getline(caller.file, caller.line).strip() if caller else ""
    kind = Activity.ELSEWHERE
    if caller and not within and WAIT.search(text):
        kind = Activity.POINT_TO_POINT if caller.file.endswith(PIPELINE) else Activity.COLLECTIVE
    elif DEVICE.search(text):
        kind = Activity.DEVICE
    return RankPosition(kind, stack[0].function, stack[0], caller, text)


def conclude(places: Mapping[int, RankPosition], records: flight.Records, *, whole: bool) -> str:
    """Which rank the others wait for, in a line; `whole`: these are all ranks of the run."""
    if late := flight.behind(records):
        return _late(places, late)
    places = {rank: _on_gpu(at, records.get(rank, ())) for rank, at in sorted(places.items())}
    silent = [rank for rank, at in places.items() if at.kind is Activity.SILENT]
    free = silent or [rank for rank, at in places.items() if at.kind is Activity.ELSEWHERE]
    if 0 < len(free) < len(places):
        told = "; ".join(f"rank {rank} {_alone(places[rank])}" for rank in free)
        return f"{told}, while {_grouped(places, free)}"
    odd = _odd_one_out(places)
    if odd is not None:
        at = places[odd]
        return f"rank {odd} alone {at.kind.value[0]} {at.told}, while {_grouped(places, [odd])}"
    everyone = _grouped(places)
    if free:
        return f"no rank waits for another: {everyone}"
    if len({at.key for at in places.values()}) > 1:
        return f"each rank waits for others: {everyone}"
    if not whole:
        return f"{everyone}, all of this node: look at the other nodes"
    return f"{everyone}, all of them: a GPU or the network between them doesn't go on"


def _late(places: Mapping[int, RankPosition], late: Sequence[flight.LaggingRank]) -> str:
    """The ranks that are behind by the flight records, each once, and who waits for them."""
    told: dict[int, str] = {}
    for behind in late:
        at = f" ({_alone(places[behind.rank])})" if behind.rank in places else ""
        told.setdefault(behind.rank, f"rank {behind.rank} {behind.told}{at}")
    waiting = sorted({rank for behind in late for rank in behind.waiting} - told.keys())
    return f"{'; '.join(told.values())}, while {_ranks(waiting, 'waits', 'wait')} there"


def _on_gpu(at: RankPosition, operations: Iterable[flight.Operation]) -> RankPosition:
    """Outside of collectives, with one that its GPU has still to do, a rank waits for that."""
    pending = flight.pending(operations)
    if at.kind is not Activity.ELSEWHERE or pending is None:
        return at
    return replace(at, kind=Activity.DEVICE, pending=f", {pending.told} isn't done")


def _alone(at: RankPosition) -> str:
    if at.kind is Activity.ELSEWHERE:
        return f"isn't in a collective, but in {'function ' if at.frame else ''}{at.told}"
    return f"{at.kind.value[0]} {at.told}"


def _odd_one_out(places: Mapping[int, RankPosition]) -> int | None:
    """The one rank that is elsewhere than all others, or that alone waits for a single one."""
    keys = Counter(at.key for at in places.values())
    kinds = Counter(at.kind for at in places.values())
    for rank, at in places.items() if len(places) > 2 else ():
        alone = len(keys) == 2 and keys[at.key] == 1
        waits = at.kind is Activity.POINT_TO_POINT and len(kinds) == 2 and kinds[at.kind] == 1
        if alone or waits:
            return rank
    return None


def _grouped(places: Mapping[int, RankPosition], but: Sequence[int] = ()) -> str:
    """The ranks, together where they are in the same: "ranks 0, 2 wait in all_reduce"."""
    groups: dict[tuple[Activity, str], list[int]] = {}
    for rank, at in places.items():
        if rank not in but:
            groups.setdefault(at.key, []).append(rank)
    return ", ".join(f"{_ranks(group, *kind.value)} {at}" for (kind, at), group in groups.items())


def _ranks(ranks: Sequence[int], one: str, several: str) -> str:
    listed = ", ".join(map(str, ranks))
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {several}"


class Collector:
    """Asks a node's ranks where they are, by files in `folder`; `whole`: no other node has any."""

    def __init__(self, folder: Path, environ: Mapping[str, str], *, cpu: bool, whole: bool) -> None:
        self.folder = folder
        self.whole = whole
        self.records = {} if cpu else flight.variables(folder, environ)
        self.variables = {stacks.FOLDER: str(folder), **self.records}
        self.reports = 0

    def report(self, ranks: Mapping[int, int]) -> list[str]:
        """Where each rank is, a line each; then which one the others wait for.

        `ranks` are process ids by number. Takes ten seconds at most. It is kept with the stacks
        and records in a new folder.
        """
        self.reports += 1
        kept = self.folder / f"{REPORTS}{self.reports}"
        kept.mkdir()
        asked = {rank: flight.ask(self.records, rank) for rank in ranks} if self.records else {}
        texts = self._stacks(ranks)
        places = {rank: _where(pid, texts[rank]) for rank, pid in ranks.items()}
        records = _records({rank: file for rank, file in asked.items() if file}, kept)
        lines = [f"rank {rank} {at.kind.value[0]} {at.told}" for rank, at in places.items()]
        for rank, operations in records.items():
            lines += [f"rank {rank}: {line}" for line in flight.told(operations)]
        lines.append(f"{CONCLUSION}{conclude(places, records, whole=self.whole)}")
        for rank, text in texts.items():
            stacks.path(kept, rank).write_text(text, encoding="utf-8")
        files.write(kept / REPORT, "".join(f"{line}\n" for line in lines))  # who waits looks for it
        return lines

    def after_failure(self) -> list[str]:
        """What the flight records say that torch wrote by itself, as a collective timed out."""
        records = {}
        if self.records:
            prefix = Path(self.records["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
            for file in prefix.parent.glob(f"{prefix.name}*"):
                number = file.name.removeprefix(prefix.name)
                if number.isdecimal() and (operations := flight.read(file.read_bytes())):
                    records[int(number)] = operations
        late = flight.behind(records)
        return [f"{CONCLUSION}{_late({}, late)}"] if late else []

    def _stacks(self, ranks: Mapping[int, int]) -> dict[int, str]:
        """What each rank writes when asked to, "" of one that doesn't."""
        before = {rank: len(_text(stacks.path(self.folder, rank))) for rank in ranks}

        def written() -> dict[int, str]:
            return {n: _text(stacks.path(self.folder, n))[before[n] :] for n in ranks}

        asked = [rank for rank, pid in ranks.items() if listens(pid)]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks[rank], stacks.SIGNAL)
        until = time.monotonic() + ANSWER_SECONDS
        earlier, now = dict[int, str](), written()
        while time.monotonic() < until and not (now == earlier and all(now[n] for n in asked)):
            time.sleep(QUIET_SECONDS)
            earlier, now = now, written()
        return now


def _records(wanted: Mapping[int, Path], kept: Path) -> flight.Records:
    """The flight records that come; those of ranks that have none are left out."""
    until = time.monotonic() + RECORD_SECONDS
    records: dict[int, list[flight.Operation]] = {}
    while wanted.keys() - records.keys() and time.monotonic() < until:
        for rank in wanted.keys() - records.keys():
            with contextlib.suppress(OSError):
                data = wanted[rank].read_bytes()
                if operations := flight.read(data):
                    records[rank] = operations
                    (kept / f"rank-{rank}.nccl").write_bytes(data)
        time.sleep(QUIET_SECONDS)
    return dict(sorted(records.items()))


def _where(pid: int, text: str) -> RankPosition:
    """Where a rank is by what it wrote; one that wrote nothing, by its process."""
    if threads := stacks.parse(text):
        return place(stacks.main_thread(threads))
    if not listens(pid):
        return RankPosition(
            Activity.SILENT, "it has just been started, or it handles SIGUSR2 itself"
        )
    return RankPosition(Activity.SILENT, f"the kernel has it as {_status(pid, 'State') or 'ended'}")


def listens(pid: int) -> bool:
    """Whether a process handles the signal, which would end it otherwise (man 5 proc, SigCgt)."""
    caught = _status(pid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> (stacks.SIGNAL - 1) & 1)


def _status(pid: int, name: str) -> str:
    """A value of /proc/PID/status, "" where there is none."""
    found = re.search(rf"^{name}:\s*(.*)$", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1] if found else ""


def _text(file: Path) -> str:
    """A file of faulthandler's or the kernel's, "" where it can't be read."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def ask(runner: int) -> dict[str, bytes]:
    """The files, by name, of the report that the process `runner` writes; {} if none comes."""
    folder = _folder(runner)
    if not folder or not listens(runner):
        return {}
    before = set(folder.glob(f"{REPORTS}*/{REPORT}"))
    os.kill(runner, stacks.SIGNAL)
    until = time.monotonic() + REPORT_SECONDS
    while time.monotonic() < until:
        for report in set(folder.glob(f"{REPORTS}*/{REPORT}")) - before:
            with contextlib.suppress(OSError):  # the folder goes when the ranks have ended
                return {path.name: path.read_bytes() for path in sorted(report.parent.iterdir())}
        time.sleep(QUIET_SECONDS)
    return {}


def _processes() -> Iterator[tuple[int, list[bytes], list[bytes]]]:
    """Of each process that may be looked at: its id, command line and variables."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = [(process / name).read_bytes().split(b"\0") for name in ("cmdline", "environ")]
            yield int(process.name), words[0], words[1]


def _folder(runner: int) -> Path | None:
    """The folder that a runner's ranks write to, by their variables."""
    given = (own for pid, _, own in _processes() if _status(pid, "PPid") == str(runner))
    name = f"{stacks.FOLDER}=".encode()
    words = (word.removeprefix(name) for own in given for word in own if word.startswith(name))
    return next((Path(os.fsdecode(word)) for word in words), None)


def main() -> int:
    """Write a report of this container's run to standard output, as a tar; 1 where none comes.

    An argument is the process id of its runner, where there may be several.
    """
    listed = (pid for pid, command, _ in _processes() if b" ".join(command[1:3]).endswith(RUNNERS))
    runner = int(sys.argv[1]) if len(sys.argv) > 1 else next(listed, None)
    report = ask(runner) if runner else {}
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name, content in report.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return 0 if report else 1


if __name__ == "__main__":
    sys.exit(main())
