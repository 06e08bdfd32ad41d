"""Makes jsonl of tables and text: one object of the wanted keys for each document."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import orjson

from launcher.data import ledger, records, sources
from launcher.data.ledger import Ledger, Leniency
from launcher.data.output import alone, publish, writing
from launcher.data.records import Documents
from launcher.data.sources import Reading
from launcher.data.tokenize import Done


def convert(
    inputs: Sequence[str],
    target: Path,
    reading: Reading,
    leniency: Leniency,
    report: Callable[[Done], None],
) -> Done:
    """Write `target`, which appears when it is complete. Raises as `tokenize.run` does."""
    found = sources.sources(inputs, reading)
    sources.refuse_own(found, [target, ledger.path(target)])
    done = Done(size=sum(source.stop - source.start for source in found))
    gave: set[int] = set()
    with writing(target), ExitStack() as closed:
        (new,) = alone([target], closed)
        rejects = Ledger(found, target, leniency)
        closed.callback(rejects.close)
        for place, block in sources.blocks(found, reading):
            read = records.documents(block, reading.keys, leniency.limit)
            rejects.enter(place, block.numbers, read.faults, read.records)
            lines = _lines(read, reading.keys)
            new.file.writelines(lines)
            gave |= {place.source} if lines else set()
            done = Done(
                read=place.read,
                size=done.size,
                documents=done.documents + len(lines),
                blank=done.blank + read.blank,
                rejected=rejects.rejected,
            )
            report(done)
        new.complete()
        publish([rejects])
        new.publish()
    return replace(done, without=sources.without(found, gave))


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
