"""Tokenizes the text of a run once: the same texts, options and vocabulary give the same files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from launcher.data import contents, sources, tokenize, vocabulary
from launcher.data.faults import DataError
from launcher.data.sources import Reading
from launcher.data.tokenize import Done, Job
from launcher.data.tokenizers import Chosen
from launcher.errors import UsageError

VERSION = 1
"""Goes up when the same input would give other files."""


@dataclass(frozen=True)
class Prepared:
    """Texts as data files, which may not be there yet."""

    job: Job

    @property
    def prefix(self) -> Path:
        """Of the .bin and .idx."""
        return tokenize.outputs(self.job)[0]

    def make(self, report: Callable[[Done], None]) -> Done | None:
        """Tokenize, unless that is done; then None. Raises as `tokenize.run` does."""
        if _is_whole(self.prefix):
            return None
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        return tokenize.run(self.job, report)


def prepared(
    texts: Sequence[str], folder: Path, reading: Reading, tokenizer: Chosen, workers: int
) -> Prepared:
    """`texts` as data files below `folder`, named by what is in the texts, not where they lie.

    Each document is ended with the token for it. Raises UsageError for standard input, and for
    what can't be read.
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
    return Prepared(
        Job(tuple(texts), folder / key, reading, tokenizer, append_eod=True, workers=workers)
    )


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
