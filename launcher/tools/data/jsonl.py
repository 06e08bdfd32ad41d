"""Converts tables and text to jsonl: one object with the wanted keys per document."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import orjson

from launcher.runs.datasets.output import alone, publish, writing
from launcher.tools.data import ledger, records, sources
from launcher.tools.data.ledger import JobState, Ledger, Leniency, ReportState
from launcher.tools.data.records import Documents
from launcher.tools.data.sources import ReadingOptions


def convert(
    inputs: Sequence[str],
    target: Path,
    reading: ReadingOptions,
    leniency: Leniency,
    report: ReportState,
) -> JobState:
    """Write `target`, which appears when it is complete. Raises as `tokenize.run` does."""
    found = sources.sources(inputs, reading)
    sources.refuse_own(found, [target, ledger.rejects_path(target)])
    with writing(target), ExitStack() as closed:
        (new,) = alone([target], closed)
        rejects = Ledger(found, target, leniency, report)
        closed.callback(rejects.close)
        for place, block in sources.blocks(found, reading):
            read = records.documents(block, reading.keys, leniency.limit)
            lines = _lines(read, reading.keys)
            new.file.writelines(lines)
            rejects.enter(place, block.numbers, read, len(lines))
        publish([new, rejects])
    return rejects.done()


def _lines(found: Documents, keys: Sequence[str]) -> list[bytes]:
    columns = [
        _values(texts, counts) for texts, counts in zip(found.texts, found.counts, strict=True)
    ]
    rows = zip(*columns, strict=True)
    return [orjson.dumps(dict(zip(keys, row, strict=True))) + b"\n" for row in rows]


def _values(texts: Sequence[str], counts: Sequence[int]) -> list[object]:
    """A document's text, or the list of its texts where they aren't one."""
    values: list[object] = []
    at = 0
    for count in counts:
        values.append(texts[at] if count == 1 else list(texts[at : at + count]))
        at += count
    return values
