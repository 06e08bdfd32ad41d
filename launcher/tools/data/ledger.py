"""Accounts for what a data job has read: its progress, and the list of bad records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import orjson

from launcher.base.screen import printable
from launcher.runs.datasets.output import alone
from launcher.tools.data.faults import BadRecord, DataError
from launcher.tools.data.records import Documents
from launcher.tools.data.sources import REJECTS, InputPart, Position, lines_before, without


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


@dataclass(frozen=True)
class JobState:
    """How far a job is, or how it ended.

    read, size: bytes of the inputs as they lie on the disk; size is 0 where it isn't known
    documents, empty: of all keys the first; those of them that have no tokens
    tokens: of all keys
    blank, rejected: records that were empty lines, and those that gave no document
    without: the inputs without any document, at the end
    """

    read: int = 0
    size: int = 0
    documents: int = 0
    empty: int = 0
    tokens: int = 0
    blank: int = 0
    rejected: int = 0
    without: tuple[str, ...] = ()


ReportState = Callable[[JobState], None]


def rejects_path(prefix: Path) -> Path:
    """The list of a job that writes to `prefix`."""
    return prefix.with_name(prefix.name + REJECTS)


class Ledger:
    """What was read, and the list PREFIX.rejects.jsonl, there only when a record was left out.

    A job that may leave some out has it for itself: raises as `output.alone` does.
    """

    def __init__(
        self, sources: Sequence[InputPart], prefix: Path, leniency: Leniency, report: ReportState
    ) -> None:
        self.sources = sources
        self.leniency = leniency
        self._report = report
        self._done = JobState(size=sum(source.stop - source.start for source in sources))
        self._gave: set[int] = set()
        self.rejected = 0
        self._path = rejects_path(prefix)
        self._files = ExitStack()
        self._list = alone([self._path], self._files)[0] if leniency.skip else None
        self._source, self._records = -1, 0
        self._before: int | None = None

    def enter(
        self,
        place: Position,
        numbers: Sequence[int],
        read: Documents,
        documents: int,
        *,
        empty: int = 0,
        tokens: int = 0,
    ) -> None:
        """Account for a block, in order, and report. Raises DataError where that ends the job."""
        if place.source != self._source:
            self._source, self._records, self._before = place.source, 0, None
        for fault in read.faults:
            self._reject(fault, numbers)
        self._records += read.records
        if documents:
            self._gave.add(place.source)
        self._done = JobState(
            read=place.read,
            size=self._done.size,
            documents=self._done.documents + documents,
            empty=self._done.empty + empty,
            tokens=self._done.tokens + tokens,
            blank=self._done.blank + read.blank,
            rejected=self.rejected,
        )
        self._report(self._done)

    def done(self) -> JobState:
        """All that was read."""
        return replace(self._done, without=without(self.sources, self._gave))

    def _reject(self, fault: BadRecord, numbers: Sequence[int]) -> None:
        source = self.sources[self._source]
        line = numbers[fault.at] if numbers else self._records + fault.at + 1
        if not numbers:
            if self._before is None:
                self._before = lines_before(source)
            line += self._before
        self.rejected += 1
        if self.rejected == self.leniency.limit:
            told = f"{source.told}:{line}: {fault.reason}"
            told += f"\n  more than {self.leniency.most} such records"
            mend = "--max-errors says how many may be left out."
            if not self.leniency.skip:
                told = f"{source.told}:{line}: {fault.reason}\n  | {printable(fault.excerpt)}"
                mend = self.leniency.remedy
            raise DataError(told, f"Nothing was written. {mend}")
        record = {"file": source.told, "line": line, "reason": fault.reason}
        record["begins"] = fault.excerpt
        assert self._list is not None
        self._list.file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE))

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
