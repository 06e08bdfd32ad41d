"""Accounts for records that give no document: told by file and line, counted, and listed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson

from launcher.data.faults import BadRecord, DataError
from launcher.data.output import alone
from launcher.data.sources import REJECTS, Position, Source, lines_before
from launcher.screen import printable


@dataclass(frozen=True)
class Leniency:
    """What becomes of such a record.

    skip: leave it out and list it, in place of ending the job
    most: how many may be left out; None for any number
    remedy: what to do where one ends the job
    """

    skip: bool = False
    most: int | None = None
    remedy: str = "--on-error skip leaves such records out and lists them."

    @property
    def limit(self) -> int | None:
        """The number of them that ends the job; None where none does."""
        if not self.skip:
            return 1
        return None if self.most is None else self.most + 1


def path(prefix: Path) -> Path:
    """The list of a job that writes to `prefix`."""
    return prefix.with_name(prefix.name + REJECTS)


class Ledger:
    """The list PREFIX.rejects.jsonl, which is there only when a record was left out.

    A job that may leave some out has it for itself: raises as `output.alone` does.
    """

    def __init__(self, sources: Sequence[Source], prefix: Path, leniency: Leniency) -> None:
        self.sources = sources
        self.leniency = leniency
        self.rejected = 0
        self._path = path(prefix)
        self._files = ExitStack()
        self._list = alone([self._path], self._files)[0] if leniency.skip else None
        self._source, self._records = -1, 0
        self._before: int | None = None

    def enter(
        self, place: Position, numbers: Sequence[int], faults: Sequence[BadRecord], records: int
    ) -> None:
        """Account for a block, in order. Raises DataError where that ends the job."""
        if place.source != self._source:
            self._source, self._records, self._before = place.source, 0, None
        for fault in faults:
            self._reject(fault, numbers)
        self._records += records

    def _reject(self, fault: BadRecord, numbers: Sequence[int]) -> None:
        source = self.sources[self._source]
        line = numbers[fault.at] if numbers else self._records + fault.at + 1
        if not numbers:
            if self._before is None:
                self._before = lines_before(source)
            line += self._before
        self.rejected += 1
        if self.rejected == self.leniency.limit:
            raise self._ended(f"{source.told}:{line}: {fault.reason}", fault)
        record = {"file": source.told, "line": line, "reason": fault.reason}
        record["begins"] = fault.excerpt
        assert self._list is not None
        self._list.file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

    def _ended(self, told: str, fault: BadRecord) -> DataError:
        if not self.leniency.skip:
            return DataError(
                f"{told}\n  | {printable(fault.excerpt)}",
                f"Nothing was written. {self.leniency.remedy}",
            )
        return DataError(
            f"{told}\n  more than {self.leniency.most} such records",
            "Nothing was written. --max-errors says how many may be left out.",
        )

    def complete(self) -> None:
        """Bring the list to the disk, where it stays aside."""
        if self._list is not None and self.rejected:
            self._list.complete()

    def publish(self) -> None:
        """Give the list its name; an older one goes in any case."""
        if self._list is None or not self.rejected:
            self._path.unlink(missing_ok=True)
        else:
            self._list.publish()
        self._files.close()

    def close(self) -> None:
        """Remove what is unfinished; nothing after `publish`."""
        self._files.close()
