"""Tokenizes the text of a run once: the same texts, options and vocabulary give the same files."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from launcher.base.errors import UsageError
from launcher.images.oci.blocks import blocks_of, sha256_of
from launcher.runs.datasets import indexed, output
from launcher.runs.datasets.output import OutputBusy
from launcher.tools.data import contents, sources, tokenize, tokenizers
from launcher.tools.data.faults import DataError
from launcher.tools.data.ledger import JobState, Leniency, ReportState
from launcher.tools.data.sources import InputPart, ReadingOptions
from launcher.tools.data.tokenize import TokenizeTask
from launcher.tools.data.tokenizers import TokenizerChoice

VERSION = 4
"""Goes up when the same input would give other files."""
ELSEWHERE = ("vocab_file", "merge_file", "model", "megatron")
"""The tokenizer's identity: the contents of its files, and the rule of the release."""
STRICT = Leniency(
    remedy="`launcher data tokenize` with --on-error skip leaves such records out: give what it "
    "writes as data.path."
)
"""What a run's text has to be: all of it is trained on."""


@dataclass(frozen=True)
class PreparedText:
    """Texts as data files, which may not be there yet; `vocab_size` is the tokenizer's."""

    job: TokenizeTask
    vocab_size: int

    @property
    def prefix(self) -> Path:
        """Of the .bin and .idx."""
        return tokenize.outputs(self.job)[0]

    @property
    def is_made(self) -> bool:
        """Whether the files are there, and whole."""
        try:
            contents.open_data(self.prefix)
        except (DataError, UsageError):
            return False
        return True

    def make(self, report: ReportState) -> JobState | None:
        """Tokenize, unless that is done, by another launcher perhaps; then None.

        Raises as `tokenize.run` does, and DataError where there is no document, or a text was
        changed meanwhile.
        """
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        while not self.is_made:
            try:
                return tokenize.run(self.job, report, self._check)
            except OutputBusy:
                print("launcher: another launcher tokenizes the text: waiting", file=sys.stderr)
                output.wait(indexed.targets(self.prefix)[0])
        return None

    def _check(self, done: JobState) -> None:
        """The files are named by what was in the texts, and must not be of something else."""
        job = self.job
        if not done.documents:
            raise DataError(
                "the text of the run has no document", f"Read were {', '.join(done.without)}"
            )
        end = tokenizers.load_tokenizer(job.tokenizer).end
        if _key(sources.sources(job.inputs, job.reading), job, end) != job.prefix.name:
            raise DataError(
                "the text was changed while it was tokenized", "Start again when it is complete."
            )


def prepared(
    texts: Sequence[str],
    folder: Path,
    reading: ReadingOptions,
    tokenizer: TokenizerChoice,
    workers: int,
) -> PreparedText:
    """`texts` as data files below `folder`, named by what is in the texts, not where they lie.

    Each document is ended with the token for it. Raises UsageError for what can't be
    read, or not twice: standard input and pipes.
    """
    if sources.STDIN in texts:
        raise UsageError("the text of a run can't be standard input", "Give files.")
    found = sources.sources(texts, reading)
    names = tuple(source.name for source in found)
    if pipes := [name for name in names if not Path(name).is_file()]:
        raise UsageError(f"{pipes[0]}: not a file, and the text of a run is read twice")
    job = TokenizeTask(
        names, folder, reading, tokenizer, append_eod=True, workers=workers, leniency=STRICT
    )
    loaded = tokenizers.load_tokenizer(tokenizer)
    return PreparedText(replace(job, prefix=folder / _key(found, job, loaded.end)), loaded.size)


def _key(found: Sequence[InputPart], job: TokenizeTask, end: int | None) -> str:
    """The name for what becomes of these texts; a file's endings say how it is read."""
    said = {
        "version": VERSION,
        "reading": asdict(job.reading),
        "texts": [(Path(source.name).suffixes, _digest(Path(source.name))) for source in found],
        "tokenizer": {**asdict(job.tokenizer), **dict.fromkeys(ELSEWHERE, 0)},
        "rule": asdict(tokenizers.rule(job.tokenizer)),
        "vocabulary": [_digest(path) for path in tokenizers.tokenizer_files(job.tokenizer)],
        "end": end,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:20]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return sha256_of(blocks_of(file))
