"""Puts the traces that ranks have written in their place, and says what their time went to."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from launcher import files
from launcher.train import costs
from launcher.train.costs import Costs

TRACE = "rank-{}.json.gz"
COSTS = "rank-{}.costs.json"


class Traces:
    """A folder for traces, and what lay there before."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.before = dict(self._found())

    def _found(self) -> Iterator[tuple[Path, int]]:
        for path in self.folder.rglob("*.json*"):
            if path.is_file():
                yield path, path.stat().st_mtime_ns

    def told(self, ranks: Mapping[int, int]) -> Iterator[str]:
        """Lines on the traces that ranks have written since; `ranks` are process ids by rank.

        Each becomes `rank-N.json.gz`, and its costs a file beside it.
        """
        for rank, pid in ranks.items():
            for path in [path for path, at in self._found() if self.before.get(path) != at]:
                if self._is_of(path, rank, pid):
                    yield self._tell(path, rank)

    def _is_of(self, path: Path, rank: int, pid: int) -> bool:
        """Whether a rank wrote it: ours and Megatron 0.17 and later by rank, others by process."""
        return path.name == TRACE.format(rank) or (
            path.name.endswith(".pt.trace.json") and f"_{pid}." in path.name
        )

    def _tell(self, path: Path, rank: int) -> str:
        try:
            found = read(path)
            kept = self._kept(path, self.folder / TRACE.format(rank))
            told = {"trace": str(kept.name), "words": str(found), **asdict(found)}
            files.write(self.folder / COSTS.format(rank), f"{json.dumps(told)}\n")
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            return f"profile of rank {rank}: {path} can't be read: {error}"
        size = kept.stat().st_size / 1e6
        return f"profile of rank {rank}: {found}; its trace: {kept} ({size:.1f} MB)"

    def _kept(self, path: Path, target: Path) -> Path:
        """The trace under its own name, compressed."""
        if path == target:
            return target
        if path.suffix == ".gz":
            return files.rename(path, target)
        with files.Aside(target) as new, path.open("rb") as source:
            with gzip.open(new.file, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(source, packed)
            new.publish()
        files.remove_file(path.absolute(), self.folder.absolute())
        return target


def read(path: Path) -> Costs:
    """What a trace's time went to. Raises `OSError`, and ValueError for what is no whole trace."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as text:
        return costs.costs(costs.events(text))
