"""Reads the flight records that NCCL's process groups keep of their last collectives.

torch writes them as pickles, of a ring of entries for each process: FlightRecorderDetail.hpp in
torch/csrc/distributed/c10d, and https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from launcher.agent.ranks.stacks import Frame

ENTRIES = 2000
"""How many collectives each rank keeps; the default of torch 2.6 and later."""

DUMPS, PIPES = "nccl-", "pipe-"
"""How the names of the files begin that torch writes, and of those that it is asked by."""


@dataclass(frozen=True)
class Operation:
    """A collective, or a send or receive, as one rank recorded it.

    `number` counts the collectives of `group`, or its sends and receives; `state` is scheduled,
    started or completed; `caller` is the innermost line that isn't torch's.
    """

    group: str
    described: str
    number: int
    name: str
    state: str
    sizes: str
    point_to_point: bool
    caller: str

    @property
    def told(self) -> str:
        return f"{self.name} {self.number} of group {self.described}"


def variables(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Makes torch 2.3 and later keep records and write them when asked; the user's values win."""
    defaults = {
        **({} if _keeps_records() else {"TORCH_NCCL_TRACE_BUFFER_SIZE": str(ENTRIES)}),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(folder / DUMPS),
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(folder / PIPES),
    }
    return {name: environ.get(name, value) for name, value in defaults.items()}


def _keeps_records() -> bool:
    """Whether this Python's torch keeps `ENTRIES` unasked; later ones warn of the variable."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return False
    return found is not None and (int(found[1]), int(found[2])) >= (2, 6)


def ask(wanted: Mapping[str, str], rank: int) -> Path | None:
    """Ask a rank's torch for its record; the file that it goes to.

    None where the rank doesn't listen: it has no NCCL group yet, or never will. `wanted` is what
    the rank got from `variables`.
    """
    prefix = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", wanted["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"])
    pipe = f"{wanted['TORCH_NCCL_DEBUG_INFO_PIPE_FILE']}{rank}.pipe"
    try:
        writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None
    dump = Path(f"{prefix}{rank}")
    with contextlib.suppress(OSError):
        dump.unlink()  # an earlier answer
    os.write(writer, b"1")
    os.close(writer)
    return dump


class _PlainUnpickler(pickle.Unpickler):
    """Makes numbers, texts, lists and dictionaries, and nothing that a pickle could run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} in a flight record")


def read(data: bytes) -> list[Operation]:
    """The operations in a record, oldest first; none of one that isn't whole or isn't a record."""
    try:
        record = _PlainUnpickler(io.BytesIO(data)).load()
        return [_operation(entry) for entry in record["entries"]]
    except Exception:  # a cut pickle raises nearly anything
        return []


def _operation(entry: Mapping[str, Any]) -> Operation:
    """An entry of any version: 2.3 had one number for both kinds, and no group's description."""
    group = entry.get("process_group") or (str(entry.get("pg_id", "")), "")
    name = str(entry.get("profiling_name", "")).partition(":")[2] or "operation"
    words = name.split()
    point_to_point = bool(entry.get("is_p2p", words[0] in ("send", "recv")))
    number = entry.get("p2p_seq_id" if point_to_point else "collective_seq_id")
    frames = [
        Frame(str(frame["filename"]), int(frame["line"]), str(frame["name"]))
        for frame in entry.get("frames") or ()
    ]
    done = entry.get("retired") and entry.get("state") == "scheduled"
    return Operation(
        group=str(group[0]),
        described=str(group[1]) if group[1] not in ("", "undefined") else str(group[0]),
        number=int(entry.get("seq_id", 0) if number is None else number),
        name=name,
        state="completed" if done else str(entry.get("state", "")),
        sizes=str(entry.get("input_sizes", "")),
        point_to_point=point_to_point,
        caller=next((frame.place for frame in frames if not frame.is_library), ""),
    )


Records = Mapping[int, list[Operation]]
"""Each rank's operations, oldest first; ranks without a record are left out."""


def last(operations: Iterable[Operation]) -> dict[str, Operation]:
    """The newest collective of each group."""
    found: dict[str, Operation] = {}
    for operation in operations:
        known = found.get(operation.group)
        if not operation.point_to_point and (known is None or known.number <= operation.number):
            found[operation.group] = operation
    return found


def pending(operations: Iterable[Operation]) -> Operation | None:
    """The oldest that the GPU hasn't completed."""
    return next((one for one in operations if one.state != "completed"), None)


def told(operations: Sequence[Operation]) -> list[str]:
    """The newest collective of each group in a line, and the oldest that isn't completed."""
    lines = []
    for newest in last(operations).values():
        first = pending(one for one in operations if one.group == newest.group) or newest
        at = f", from {first.caller}" if first.caller else ""
        lines.append(f"NCCL: {first.told} is {first.state}, the newest is {newest.number}{at}")
    return lines


@dataclass(frozen=True)
class LaggingRank:
    """A rank that others wait for: it hasn't come to `awaited`, its own last one is `reached`."""

    rank: int
    awaited: Operation
    reached: Operation
    waiting: tuple[int, ...]

    @property
    def told(self) -> str:
        """What a record says of it, in words."""
        if self.awaited.number == self.reached.number:
            return f"has {_shape(self.reached)} where others have {_shape(self.awaited)}"
        own = self.reached.number
        return f"hasn't come to {self.awaited.told}, where its last is number {own}"


def _shape(operation: Operation) -> str:
    return f"{operation.told} {operation.sizes}".rstrip()


def behind(records: Records) -> list[LaggingRank]:
    """The ranks that others wait for in some group: behind them, or in another collective.

    Ranks are compared in groups that they have operations of. Where a number of a group belongs to
    different collectives, the rarer one is taken for wrong; none where they are equally many. One
    that waits itself, in another group, is left out: who waits for it waits for the other.
    """
    found = list[LaggingRank]()
    newest = {rank: last(operations) for rank, operations in records.items()}
    for group in sorted({group for groups in newest.values() for group in groups}):
        members = {rank: groups[group] for rank, groups in newest.items() if group in groups}
        furthest = max(members.values(), key=lambda operation: operation.number)
        if furthest.state == "completed":
            continue
        there = [rank for rank, operation in members.items() if operation.number == furthest.number]
        for rank in sorted(set(members) - set(there)):
            found.append(LaggingRank(rank, furthest, members[rank], tuple(sorted(there))))
        found += _mismatched({rank: members[rank] for rank in there})
    waiting = {rank for one in found for rank in one.waiting}
    return [one for one in found if one.rank not in waiting] or found


def _mismatched(members: Mapping[int, Operation]) -> list[LaggingRank]:
    """Those of the ranks at one number whose collective is another than most others'."""
    (most, count), *others = Counter(each.name for each in members.values()).most_common()
    if any(times == count for _, times in others):
        return []
    right = tuple(rank for rank, operation in members.items() if operation.name == most)
    return [
        LaggingRank(rank, members[right[0]], operation, right)
        for rank, operation in members.items()
        if operation.name != most
    ]
