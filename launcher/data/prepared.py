"""Tokenizes the text of a run once: the same texts, options and vocabulary give the same files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from launcher.data import contents, sources, tokenize, vocabulary
from launcher.data.faults import DataError
from launcher.data.sources import Reading
from launcher.data.tokenize import Done, Job
from launcher.data.tokenizers import Chosen
from launcher.errors import UsageError

VERSION = 1
"""Goes up when the same input would give other files."""


def prepared(
    texts: Sequence[str],
    folder: Path,
    reading: Reading,
    tokenizer: Chosen,
    workers: int,
    report: Callable[[Done], None],
    *,
    dry: bool = False,
) -> tuple[Path, Done | None]:
    """The prefix of `texts` as data files below `folder`, made where they aren't there yet.

    With it comes what was done, None for nothing, as always with `dry`. Each document is ended
    with the token for it. The files' names are of what is in the texts, not of where they lie.
    Raises as `tokenize.run` does, and UsageError for standard input.
    """
    if sources.STDIN in texts:
        raise UsageError("the text of a run can't be standard input", "Give files.")
    named = sources.sources(texts, reading)
    used = _files(tokenizer)
    said = {
        "version": VERSION,
        "reading": asdict(reading),
        "tokenizer": {**asdict(tokenizer), "vocab_file": 0, "merge_file": 0, "model": 0},
        "files": [_digest(Path(source.name)) for source in named],
        "formats": [source.format for source in named],
        "vocabulary": [_digest(path) for path in used],
    }
    key = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:20]
    job = Job(tuple(texts), folder / key, reading, tokenizer, append_eod=True, workers=workers)
    prefix = tokenize.outputs(job)[0]
    if dry or _is_whole(prefix):
        return prefix, None
    folder.mkdir(parents=True, exist_ok=True)
    return prefix, tokenize.run(job, report)


def _files(tokenizer: Chosen) -> Iterable[Path]:
    if tokenizer.model is not None:
        return [tokenizer.model.expanduser()]
    return vocabulary.files(tokenizer.vocab_file, tokenizer.merge_file)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _is_whole(prefix: Path) -> bool:
    try:
        contents.opened(prefix)
    except (DataError, UsageError):
        return False
    return True
