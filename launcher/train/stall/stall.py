"""Says which rank of a run that stands still waits where, from their stacks and flight records."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TypeVar

from launcher.train.ranks import stacks
from launcher.train.ranks.stacks import Frame, Stack
from launcher.train.stall import flight
from launcher.train.words import CONCLUSION, REPORT, REPORTS

ANSWER_SECONDS = 5.0
"""How long all ranks have to write their stacks; a rank that can takes milliseconds."""

QUIET_SECONDS = 0.2
"""After this long without a new byte, a rank's stacks are taken for whole."""

RECORD_SECONDS = 5.0
"""How long torch has to write a flight record: its monitor looks for requests once a second."""

REPORT_SECONDS = 30.0
"""How long who asked for a report waits for it: longer than the runner takes."""

RUNNER = [b"-m", b"launcher.train.runner"]

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


class Kind(Enum):
    """What a rank is doing: the words for one rank, and for several."""

    COLLECTIVE = ("waits in", "wait in")
    POINT_TO_POINT = ("waits for one rank in", "wait for one rank in")
    DEVICE = ("waits for its GPU in", "wait for their GPUs in")
    ELSEWHERE = ("is in", "are in")
    SILENT = ("doesn't answer:", "don't answer:")


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank is: in `what` at `frame`, come from `caller`, the program's innermost line.

    `source` is the text of that line, as far as it can be read, and no collective is waited in.
    `pending` is what its GPU has to do first, where that is known.
    """

    kind: Kind
    what: str
    frame: Frame | None = None
    caller: Frame | None = None
    source: str = ""
    pending: str = ""

    @property
    def shared(self) -> str:
        """What ranks have in common that are there; told without the line of a library."""
        short = self._from or not self.frame
        return f"{self.what}{self._from}{self.pending}" if short else self.told

    @property
    def told(self) -> str:
        """The place in words, which `kind` goes before."""
        at = f"{self.what} ({self.frame.place}){self._from}" if self.frame else self.what
        return f"{at}: {self.source}{self.pending}" if self.source else f"{at}{self.pending}"

    @property
    def _from(self) -> str:
        return f", from {self.caller.place}" if self.caller and self.caller != self.frame else ""


Source = Callable[[str, int], str]
"""The text of a file's line, "" where it can't be read."""


def source_line(file: str, line: int) -> str:
    """From the file itself."""
    return linecache.getline(file, line).strip()


def place(stack: Stack, source: Source = source_line) -> Whereabouts:
    """Where a rank is, by its main thread's stack."""
    if not stack:
        return Whereabouts(Kind.ELSEWHERE, "no Python function")
    passed = 0
    while passed < len(stack) and stack[passed].is_library:
        passed += 1
    within, caller = stack[:passed], stack[passed] if passed < len(stack) else None
    for frame in reversed(within):  # the outermost is what the program called
        if COLLECTIVES.search(frame.file) and frame.function != "<module>":
            single = frame.function in POINT_TO_POINT
            kind = Kind.POINT_TO_POINT if single else Kind.COLLECTIVE
            return Whereabouts(kind, frame.function, frame, caller)
    text = source(caller.file, caller.line) if caller else ""
    kind = Kind.ELSEWHERE
    if caller and not within and WAIT.search(text):
        kind = Kind.POINT_TO_POINT if caller.file.endswith(PIPELINE) else Kind.COLLECTIVE
    elif DEVICE.search(text):
        kind = Kind.DEVICE
    return Whereabouts(kind, stack[0].function, stack[0], caller, text)


def conclude(places: Mapping[int, Whereabouts], records: flight.Records, *, whole: bool) -> str:
    """Which rank the others wait for, in a line.

    `whole` is whether these are all ranks of the run, and not those of one node among several.
    """
    if late := flight.behind(records):
        return _late(places, late)
    places = {rank: _on_gpu(at, records.get(rank, ())) for rank, at in places.items()}
    silent = [rank for rank, at in places.items() if at.kind is Kind.SILENT]
    free = silent or [rank for rank, at in places.items() if at.kind is Kind.ELSEWHERE]
    others = [rank for rank in places if rank not in free]
    if free and others:
        told = [f"rank {rank} {_alone(places[rank])}" for rank in free]
        return f"{'; '.join(told)}, while {_grouped(places, others)}"
    odd = _odd_one_out(places)
    if odd is not None:
        others = [rank for rank in places if rank != odd]
        at = places[odd]
        return f"rank {odd} alone {at.kind.value[0]} {at.told}, while {_grouped(places, others)}"
    everyone = _grouped(places, places)
    if free:
        return f"no rank waits for another: {everyone}"
    if len(set(map(_key, places.values()))) > 1:
        return f"each rank waits for others: {everyone}"
    if not whole:
        return f"{everyone}, all of this node: look at the other nodes"
    return f"{everyone}, all of them: a GPU or the network between them doesn't go on"


def _late(places: Mapping[int, Whereabouts], late: Sequence[flight.Behind]) -> str:
    """The ranks that are behind by the flight records, each told once, and who waits for them."""
    told = {
        one.rank: f"rank {one.rank} {one.told}"
        + (f" ({_alone(places[one.rank])})" if one.rank in places else "")
        for one in reversed(late)
    }
    waiting = sorted({rank for one in late for rank in one.waiting} - set(told))
    return f"{'; '.join(reversed(told.values()))}, while {_ranks(waiting, 'waits', 'wait')} there"


def _on_gpu(at: Whereabouts, operations: Iterable[flight.Operation]) -> Whereabouts:
    """Outside of collectives, with one that its GPU has still to do, a rank waits for that."""
    pending = flight.pending(operations)
    if at.kind is not Kind.ELSEWHERE or pending is None:
        return at
    return replace(at, kind=Kind.DEVICE, pending=f", {pending.told} isn't done")


def _alone(at: Whereabouts) -> str:
    if at.kind is Kind.ELSEWHERE:
        return f"isn't in a collective: in {at.told}"
    return f"{at.kind.value[0]} {at.told}"


def _odd_one_out(places: Mapping[int, Whereabouts]) -> int | None:
    """The one rank that is elsewhere than all others, or that alone waits for a single one."""
    if len(places) < 3:
        return None
    by_place = _by(places, _key)
    alone = [ranks[0] for ranks in by_place.values() if len(ranks) == 1]
    if len(by_place) == 2 and len(alone) == 1:
        return alone[0]
    by_kind = _by(places, lambda at: at.kind)
    single = by_kind.get(Kind.POINT_TO_POINT, [])
    return single[0] if len(single) == 1 and len(by_kind) == 2 else None


def _key(at: Whereabouts) -> tuple[Kind, str]:
    return at.kind, at.shared


def _grouped(places: Mapping[int, Whereabouts], ranks: Iterable[int]) -> str:
    """Those ranks, together where they are in the same: "ranks 0, 2 wait in all_reduce"."""
    by_place = _by({rank: places[rank] for rank in ranks}, _key)
    return ", ".join(
        f"{_ranks(members, *kind.value)} {told}" for (kind, told), members in by_place.items()
    )


Key = TypeVar("Key")


def _by(
    places: Mapping[int, Whereabouts], key: Callable[[Whereabouts], Key]
) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = {}
    for rank in sorted(places):
        found.setdefault(key(places[rank]), []).append(rank)
    return found


def _ranks(ranks: Sequence[int], one: str, several: str) -> str:
    listed = ", ".join(str(rank) for rank in ranks)
    return f"rank {listed} {one}" if len(ranks) == 1 else f"ranks {listed} {several}"


@dataclass(frozen=True)
class Rank:
    """A rank to ask: its number among all, and its process."""

    number: int
    pid: int


class Collector:
    """Asks a node's ranks where they are; `folder` holds what they write and what is kept of it.

    `whole` is whether no other node has any.
    """

    def __init__(self, folder: Path, environ: Mapping[str, str], *, cpu: bool, whole: bool) -> None:
        self.folder = folder
        self.whole = whole
        self.records = {} if cpu else flight.variables(folder, environ)
        self.variables = {stacks.FOLDER: str(folder), **self.records}
        self.reports = 0

    def report(self, ranks: Sequence[Rank]) -> list[str]:
        """Where each rank is, a line each; then which one the others wait for.

        Takes ten seconds at most. It is kept with the stacks and records in a new folder.
        """
        self.reports += 1
        kept = self.folder / f"{REPORTS}{self.reports}"
        kept.mkdir()
        asked = {rank.number: self._ask_for_record(rank.number) for rank in ranks}
        texts = self._stacks(ranks)
        places = {rank.number: _where(rank, texts[rank.number]) for rank in ranks}
        records = self._records(asked, kept)
        lines = [f"rank {n} {at.kind.value[0]} {at.told}" for n, at in places.items()]
        for number, operations in records.items():
            lines += [f"rank {number}: {line}" for line in flight.told(operations)]
        lines.append(f"{CONCLUSION}{conclude(places, records, whole=self.whole)}")
        for number, text in texts.items():
            stacks.path(kept, number).write_text(text, encoding="utf-8")
        partial = kept / f"{REPORT}.partial"
        partial.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        partial.rename(kept / REPORT)
        return lines

    def after_failure(self) -> list[str]:
        """What the flight records say that torch wrote by itself, as a collective timed out."""
        found = {}
        if self.records:
            prefix = Path(self.records["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
            for file in prefix.parent.glob(f"{prefix.name}*"):
                number = file.name.removeprefix(prefix.name)
                if number.isdecimal() and (operations := flight.read(file.read_bytes())):
                    found[int(number)] = operations
        late = flight.behind(found)
        return [f"{CONCLUSION}{_late({}, late)}"] if late else []

    def _ask_for_record(self, rank: int) -> Path | None:
        return flight.ask(self.records, rank) if self.records else None

    def _stacks(self, ranks: Sequence[Rank]) -> dict[int, str]:
        """What each rank writes when asked to, "" of one that doesn't."""
        files = {rank.number: stacks.path(self.folder, rank.number) for rank in ranks}
        before = {number: _size(file) for number, file in files.items()}
        asked = [rank for rank in ranks if listens(rank.pid)]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, stacks.SIGNAL)
        _wait_for({rank.number: files[rank.number] for rank in asked}, before)
        return {number: _text(file)[before[number] :] for number, file in files.items()}

    def _records(self, asked: Mapping[int, Path | None], kept: Path) -> flight.Records:
        """The flight records that come; those of ranks that have none are left out."""
        files = {rank: file for rank, file in asked.items() if file}
        until = time.monotonic() + RECORD_SECONDS
        found: dict[int, list[flight.Operation]] = {}
        while files.keys() - found.keys() and time.monotonic() < until:
            for rank in files.keys() - found.keys():
                with contextlib.suppress(OSError):
                    data = files[rank].read_bytes()
                    if operations := flight.read(data):
                        found[rank] = operations
                        (kept / f"rank-{rank}.nccl").write_bytes(data)
            time.sleep(QUIET_SECONDS)
        return dict(sorted(found.items()))


def _where(rank: Rank, text: str) -> Whereabouts:
    """Where a rank is by what it wrote; one that wrote nothing is told by its process."""
    if threads := stacks.parse(text):
        return place(stacks.main_thread(threads))
    if not listens(rank.pid):
        return Whereabouts(Kind.SILENT, "it has just been started, or it handles SIGUSR2 itself")
    return Whereabouts(Kind.SILENT, f"the kernel has it as {_status(rank.pid, 'State') or 'ended'}")


def _wait_for(files: Mapping[int, Path], before: Mapping[int, int]) -> None:
    """Wait until all files have grown and none grows any more, for `ANSWER_SECONDS` at most."""
    until = time.monotonic() + ANSWER_SECONDS
    sizes, changed = {number: before[number] for number in files}, time.monotonic()
    while time.monotonic() < until:
        now = {number: _size(file) for number, file in files.items()}
        if now != sizes:
            sizes, changed = now, time.monotonic()
        all_came = all(now[number] > before[number] for number in files)
        if all_came and time.monotonic() > changed + QUIET_SECONDS:
            return
        time.sleep(QUIET_SECONDS / 10)


def listens(pid: int) -> bool:
    """Whether a process handles the signal, which would end it otherwise (man 5 proc, SigCgt)."""
    caught = _status(pid, "SigCgt")
    return bool(caught) and bool(int(caught, 16) >> (stacks.SIGNAL - 1) & 1)


def _status(pid: int, name: str) -> str:
    """A value of /proc/PID/status, "" where there is none."""
    found = re.search(rf"^{name}:\s*(.*)$", _text(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found[1] if found else ""


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _text(file: Path) -> str:
    """What faulthandler and the kernel write is ASCII, so that sizes in bytes are places in it."""
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def ask(runner: int) -> dict[str, bytes]:
    """Ask a runner for a report, by its process id: the files of it, by name.

    None where it doesn't listen, or has no ranks, or ends meanwhile.
    """
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
    for pid, _, variables in _processes():
        if _status(pid, "PPid") == str(runner):
            for variable in variables:
                if variable.startswith(f"{stacks.FOLDER}=".encode()):
                    return Path(os.fsdecode(variable.partition(b"=")[2]))
    return None


def main() -> int:
    """Write a report of this container's run to standard output, as a tar; 1 where none comes."""
    runner = next((pid for pid, command, _ in _processes() if command[1:3] == RUNNER), None)
    files = ask(runner) if runner else {}
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return 0 if files else 1


if __name__ == "__main__":
    sys.exit(main())
