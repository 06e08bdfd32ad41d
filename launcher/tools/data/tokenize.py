"""Tokenizes inputs to .bin and .idx: all documents or none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from launcher import __version__
from launcher.base.errors import UsageError
from launcher.base.settings import expanded
from launcher.runs.datasets import indexed
from launcher.runs.datasets.indexed import IndexedOutput
from launcher.runs.datasets.output import publish, writing
from launcher.tools.data import ledger, records, sources, tokenizers
from launcher.tools.data.faults import DataError, RecordRefusal
from launcher.tools.data.ledger import JobState, Ledger, Leniency, ReportState
from launcher.tools.data.records import Block
from launcher.tools.data.sources import Position, ReadingOptions
from launcher.tools.data.tokenizers import Tokenizer, TokenizerChoice
from launcher.tools.data.workers import Workers

KINDS = {2: np.dtype("<u2"), 4: np.dtype("<i4")}
"""What a token is written as, by its bytes."""


@dataclass(frozen=True)
class TokenizeTask:
    """What is asked for.

    prefix: of the outputs, which are PREFIX_KEY_document.bin and .idx for each key
    append_eod: put the tokenizer's end-of-document token behind each document that has tokens
    workers: processes that tokenize
    """

    inputs: tuple[str, ...]
    prefix: Path
    reading: ReadingOptions
    tokenizer: TokenizerChoice
    append_eod: bool = False
    workers: int = 1
    leniency: Leniency = field(default_factory=Leniency)


class Columns(NamedTuple):
    """Some documents as they are written: tokens, each sequence's length, each document's count.

    tokens: little-endian, two or four bytes each; lengths: int32, tokens of each sequence;
    counts: int32, sequences of each document.
    """

    tokens: bytes
    lengths: NDArray[np.int32]
    counts: NDArray[np.int32]


def outputs(job: TokenizeTask) -> list[Path]:
    """The prefixes of what a job writes, in the order of its keys; the names are upstream's."""
    return [Path(f"{job.prefix}_{key}_document") for key in job.reading.keys]


def run(job: TokenizeTask, report: ReportState, check: ReportState = lambda done: None) -> JobState:
    """Tokenize, reporting after each block; the outputs appear when all of it is written.

    `check` is called before they do, and keeps them away by what it raises.

    Raises DataError where a record gives no document and may not be left out, or an input can't
    be read to its end; UsageError for what is wrong with the job. Then nothing is written.
    """
    found = sources.sources(job.inputs, job.reading)
    tokenizer = tokenizers.load_tokenizer(job.tokenizer)
    if job.append_eod and tokenizer.end is None:
        raise UsageError("the tokenizer has no end-of-document token", "Name it: --eod-token")
    names = [path for prefix in outputs(job) for path in indexed.targets(prefix)]
    sources.refuse_own(found, [*names, ledger.rejects_path(job.prefix)])
    with writing(job.prefix), ExitStack() as closed:
        written: list[IndexedOutput] = []
        for prefix in outputs(job):
            written.append(IndexedOutput(prefix, indexed.token_width(tokenizer.size)))
            written[-1].made = _made(job, tokenizer.size)
            closed.callback(written[-1].close)
        rejects = Ledger(found, job.prefix, job.leniency, report)
        closed.callback(rejects.close)
        _write(job, found, tokenizer, written, rejects)
        done = rejects.done()
        check(done)
        publish([rejects, *written])
    return done


def _made(job: TokenizeTask, vocab_size: int) -> dict[str, Any]:
    """The warning: the release's rule makes other tokens of the same vocabulary."""
    chosen = {key: value for key, value in asdict(job.tokenizer).items() if value is not None}
    chosen["rule"] = asdict(tokenizers.rule(job.tokenizer))
    return {
        "launcher": __version__,
        "tokenizer": {k: _whole(v) if isinstance(v, Path) else v for k, v in chosen.items()},
        "vocab_size": vocab_size,
        "append_eod": job.append_eod,
        "inputs": list(job.inputs),
    }


def _whole(path: Path) -> str:
    """The path as it is from any folder."""
    return str(expanded(path).absolute())


def _write(
    job: TokenizeTask,
    found: Sequence[sources.InputPart],
    tokenizer: Tokenizer,
    written: Sequence[IndexedOutput],
    rejects: Ledger,
) -> None:
    """Send blocks to workers, and write in order what comes back."""
    sent: deque[tuple[Position, Sequence[int]]] = deque()

    def blocks() -> Iterator[Block]:
        for place, block in sources.blocks(found, job.reading):
            sent.append((place, block.numbers))
            yield block

    workers = Workers(partial(_encode, job, tokenizer), job.workers)
    for columns, read in workers.map(blocks()):
        place, numbers = sent.popleft()
        tokens = 0
        for output, part in zip(written, columns, strict=True):
            output.add(*part)
            tokens += len(part.tokens) // output.width
        first = columns[0].counts
        empty = len(first) - int(np.count_nonzero(first))
        rejects.enter(place, numbers, read, len(first), empty=empty, tokens=tokens)


def _encode(
    job: TokenizeTask, tokenizer: Tokenizer, block: Block
) -> tuple[list[Columns], records.Documents]:
    """In a worker: a block's documents of each key as they are written, and all but their texts."""
    read = partial(records.documents, block, job.reading.keys, job.leniency.limit)
    found = read()
    try:
        tokens = [tokenizers.encoded(tokenizer, texts) for texts in found.texts]
    except RecordRefusal:
        found = read(lambda document: [tokenizers.encoded(tokenizer, texts) for texts in document])
        tokens = [tokenizers.encoded(tokenizer, texts) for texts in found.texts]
    end = tokenizer.end if job.append_eod else None
    kind = KINDS[indexed.token_width(tokenizer.size)]
    parts = [
        laid_out(some, counts, kind, end) for some, counts in zip(tokens, found.counts, strict=True)
    ]
    found.texts, found.counts = [], []
    return parts, found


def laid_out(
    texts: Sequence[NDArray[np.generic]],
    counts: Sequence[int],
    kind: np.dtype[np.generic],
    end: int | None,
) -> Columns:
    """Lay out texts, of which each document has as many as `counts` says.

    Upstream's rules (tools/preprocess_data.py): a text without tokens gives no sequence; a
    document is the sequences of its texts, maybe none; the end-of-document token follows the last.

    `end` is the end-of-document token, None for none. Raises DataError for tokens that `kind`
    can't hold.
    """
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    kept = lengths > 0
    of_document: NDArray[Any] = np.repeat(np.arange(len(counts)), counts)
    found = np.bincount(of_document[kept], minlength=len(counts))
    lengths = lengths[kept]
    tokens = _as(kind, np.concatenate(texts)) if texts else np.empty(0, kind)
    if end is not None:
        last = (np.cumsum(found) - 1)[found > 0]
        tokens = np.insert(tokens, np.cumsum(lengths)[last], end)
        lengths[last] += 1
    return Columns(tokens.tobytes(), lengths.astype("<i4"), found.astype("<i4"))


def _as(kind: np.dtype[np.generic], tokens: NDArray[Any]) -> NDArray[Any]:
    """The tokens as `kind`, whose bytes would make another token of one that is too large."""
    most = np.iinfo(kind).max
    if tokens.size and (wrong := tokens[(tokens < 0) | (tokens > most)]).size:
        raise DataError(
            f"token {wrong[0]}, and the tokens of this vocabulary are from 0 to {most} at most",
            "The tokenizer's own special tokens aren't all in its vocabulary.",
        )
    return tokens.astype(kind)
