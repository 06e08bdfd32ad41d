"""Accounts for records that give no document: told by file and line, counted, and listed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from launcher.data.faults import DataError, Fault
from launcher.data.sources import REJECTS, Place, Source, lines_before, refuse_own


@dataclass(frozen=True)
class Leniency:
    """What becomes of such a record.

    skip: leave it out and list it, in place of ending the job
    most: how many may be left out; None for any number
    """

    skip: bool = False
    most: int | None = None


class Ledger:
    """The list PREFIX.rejects.jsonl, which is there only when a record was left out."""

    def __init__(self, sources: Sequence[Source], prefix: Path, leniency: Leniency) -> None:
        self.sources = sources
        self.leniency = leniency
        self.rejected = 0
        self._path = prefix.with_name(prefix.name + REJECTS)
        self._partial = self._path.with_name(self._path.name + ".partial")
        self._file: IO[str] | None = None
        self._source, self._records = -1, 0
        self._before: int | None = None
        refuse_own(sources, self._path)

    def enter(
        self, place: Place, numbers: Sequence[int], faults: Sequence[Fault], records: int
    ) -> None:
        """Account for a block, in order. Raises DataError where that ends the job."""
        if place.source != self._source:
            self._source, self._records, self._before = place.source, 0, None
        for fault in faults:
            self._reject(fault, numbers)
        self._records += records

    def _reject(self, fault: Fault, numbers: Sequence[int]) -> None:
        source = self.sources[self._source]
        line = numbers[fault.at] if numbers else self._records + fault.at + 1
        if not numbers:
            if self._before is None:
                self._before = lines_before(source)
            line += self._before
        told = f"{source.told}:{line}: {fault.reason}"
        self.rejected += 1
        if not self.leniency.skip:
            raise DataError(
                f"{told}\n  | {fault.excerpt}",
                "Nothing was written. --on-error skip leaves such records out and lists them.",
            )
        if self.leniency.most is not None and self.rejected > self.leniency.most:
            raise DataError(
                f"{told}\n  more than {self.leniency.most} such records",
                "Nothing was written. --max-errors says how many may be left out.",
            )
        if self._file is None:
            self._file = self._partial.open("w", encoding="utf-8")
        record = {"file": source.told, "line": line, "reason": fault.reason}
        record["begins"] = fault.excerpt
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")

    def publish(self) -> Path | None:
        """Give the list its name, and return that; an older list goes in any case."""
        if self._file is None:
            self._path.unlink(missing_ok=True)
            return None
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        self._partial.replace(self._path)
        return self._path

    def close(self) -> None:
        """Remove an unfinished list."""
        if self._file is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)
