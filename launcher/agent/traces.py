"""Collects the traces that ranks write, and reports what their time went to."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.agent import costs
from launcher.agent.costs import Costs
from launcher.agent.words import COSTS
from launcher.base import files, owned

TRACE = "rank-{}.json.gz"
REPORT = "rank-{}.nsys-rep"


class Traces:
    """A folder for traces, and what lay there before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = dict(self._found())

    def _found(self) -> Iterator[tuple[Path, int]]:
        for path in self.folder.rglob("*"):
            if path.is_file() and (".json" in path.name or path.suffix == ".nsys-rep"):
                yield path, path.stat().st_mtime_ns

    def told(self, ranks: Mapping[int, int], nsys: Collection[int] = ()) -> Iterator[str]:
        """Lines on the traces that ranks have written since; `ranks` are process ids by rank.

        Each becomes `rank-N.json.gz`, and its costs a file beside it. nsys writes none of steps
        that a rank has not come to.
        """
        for rank, pid in ranks.items():
            new = [path for path, at in self._found() if self.before.get(path) != at]
            mine = [path for path in new if self._is_of(path, rank, pid)]
            yield from (self._tell(path, rank) for path in mine)
            if rank in nsys and not mine:
                yield f"profile of rank {rank}: nsys wrote no report: it saw no traced step"

    def _is_of(self, path: Path, rank: int, pid: int) -> bool:
        """Whether a rank wrote it: ours and Megatron 0.17 and later by rank, others by process."""
        return path.name in (TRACE.format(rank), REPORT.format(rank)) or (
            path.name.endswith(".pt.trace.json") and f"_{pid}." in path.name
        )

    def _tell(self, path: Path, rank: int) -> str:
        try:
            found = read(path)
            kept = self._kept(path, self.folder / TRACE.format(rank))
            told = {"trace": str(kept.name), "words": str(found), **asdict(found)}
            files.write(self.folder / COSTS.format(rank), f"{json.dumps(told)}\n")
        except (OSError, EOFError, ValueError, KeyError, TypeError, sqlite3.Error) as error:
            return f"profile of rank {rank}: {path} can't be read: {error}"
        size = kept.stat().st_size / 1e6
        return f"profile of rank {rank}: {found}; its trace: {kept} ({size:.1f} MB)"

    def _kept(self, path: Path, target: Path) -> Path:
        """The trace under its own name, compressed."""
        if path == target or path.name.endswith(".nsys-rep"):
            return path
        if path.suffix == ".gz":
            return files.rename(path, target)
        with files.PendingFile(target) as new, path.open("rb") as source:
            with gzip.open(new.file, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(source, packed)
            new.publish()
        owned.remove_file(path.absolute(), self.folder.absolute())
        return target


EXPORTED = {
    "kernel": "SELECT start, end, value FROM CUPTI_ACTIVITY_KIND_KERNEL JOIN StringIds"
    " ON id = demangledName",
    "gpu_memcpy": "SELECT start, end, 'Memcpy' FROM CUPTI_ACTIVITY_KIND_MEMCPY",
    "gpu_memset": "SELECT start, end, 'Memset' FROM CUPTI_ACTIVITY_KIND_MEMSET",
}
"""What a GPU did, in ns, by the kinds of torch's traces.

https://docs.nvidia.com/nsight-systems, "SQLite Schema Reference"; a table without rows is left out
"""


def _events(report: Path) -> Iterator[Mapping[str, Any]]:
    """What nsys saw a GPU do, as events of a trace. Raises `OSError`, ValueError, sqlite3.Error."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.sqlite")
        words = ["nsys", "export", "--type=sqlite", f"--output={out}", str(report)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError((done.stderr or done.stdout).strip()[-200:])
        with closing(sqlite3.connect(out)) as tables:
            there = {name for (name,) in tables.execute("SELECT name FROM sqlite_master")}
            for kind, query in EXPORTED.items():
                if query.split(" FROM ")[1].split()[0] in there:
                    for start, end, name in tables.execute(query):
                        span = {"ts": start / 1e3, "dur": (end - start) / 1e3}
                        yield {"ph": "X", "cat": kind, "name": name, **span}


def read(path: Path) -> Costs:
    """What a trace's time went to. Raises `OSError`, and ValueError for what is no whole trace."""
    if path.suffix == ".nsys-rep":
        found = costs.costs(_events(path))
        if not found.device:
            raise ValueError("nsys saw nothing of a GPU")
        return found
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as text:
        return costs.costs(costs.events(text))
