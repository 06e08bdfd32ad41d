"""Tokenizes `data.text` before a run, and sets data.path to the result."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.agent import series
from launcher.base.errors import UsageError
from launcher.base.settings import expanded
from launcher.runs.plan.program import ProgramKind, program
from launcher.runs.plan.render import null_adds_one
from launcher.runs.runfile.config import Data, RunConfig
from launcher.runs.runfile.origins import Origin

if TYPE_CHECKING:
    from launcher.tools.data.prepared import PreparedText
    from launcher.tools.data.tokenizers import TokenizerChoice


@dataclass(frozen=True)
class TokenizedRun:
    """A run's configuration with `data.path` in the place of `data.text`, and how that is made."""

    config: RunConfig
    text: PreparedText | None = None
    note: str = ""

    def make(self) -> None:
        """Tokenize the text, unless that is done, with a bar.

        Raises DataError for a document that can't be tokenized; then there are no files.
        """
        if self.text is None:
            return
        from launcher.tools.data.bar import Bar

        with Bar() as bar:
            if done := self.text.make(bar):
                bar.end(done, [f"{self.text.prefix}.bin"])


def tokenized(
    config: RunConfig, origin: Origin, cache: Path, release: Callable[[], str | None]
) -> TokenizedRun:
    """What a run is given for its text: files in `data` in the launcher's cache, by its content.

    The tokens are those of the image's `release`, which is asked for where there is a text. A
    preset's data.path and data.vocab_size are of the preset's own data, and give way. Raises
    UsageError for what can't be read, ModuleNotFoundError where a package for it is missing.
    """
    data = config.data
    if data.text is None:
        if data.text_key is not None:
            raise UsageError("data.text_key without data.text", "Name the files: data.text.")
        return _as_made(config, origin, release)
    if data.path is not None and not origin.is_presets("data.path"):
        raise UsageError("data.text and data.path: both say what is trained on", "Leave one out.")
    from launcher.base.install import install

    install()
    from launcher.tools.data import workers
    from launcher.tools.data.prepared import prepared
    from launcher.tools.data.sources import ReadingOptions

    chosen = chosen_by(data, release())
    reading = ReadingOptions(keys=(data.text_key or "text",))
    found = prepared(data.text, cache / "data", reading, chosen, workers.usual())
    size = _vocabulary(data, origin, found)
    given = {"path": str(found.prefix), "text": None, "text_key": None, "vocab_size": size}
    return TokenizedRun(config.model_copy(update={"data": data.model_copy(update=given)}), found)


def _as_made(config: RunConfig, origin: Origin, release: Callable[[], str | None]) -> TokenizedRun:
    """The run with the tokenizer and vocabulary by which its data files were made.

    They are those of PREFIX.made.json, where the run file says none of its own.
    """
    data = config.data
    if data.path is None or origin.is_presets("data.path") or data.tokenizer_type:
        return TokenizedRun(config)
    parts = data.path if isinstance(data.path, list) else [data.path]
    found = [_how_made(part) for part in parts if isinstance(part, str)]
    if data.vocab_size is None and program(config.program).kind is ProgramKind.OURS:
        _require(parts, origin)
    size = (found[0] or {}).get("vocab_size")
    tokenizers = [(one or {}).get("tokenizer") for one in found]
    if not isinstance(size, int) or size < 1 or any(one != tokenizers[0] for one in tokenizers):
        return TokenizedRun(config)
    if not _gives_way(data, origin, size):
        return TokenizedRun(config)
    upstreams = program(config.program).kind is ProgramKind.UPSTREAM
    given = _upstreams(tokenizers[0], size, release()) if upstreams else {"vocab_size": size}
    if given.items() <= data.model_dump().items():
        return TokenizedRun(config)
    told = ", ".join(f"data.{name}: {value}" for name, value in given.items())
    config = config.model_copy(update={"data": data.model_copy(update=given)})
    return TokenizedRun(config, note=f"{told}, as when the data was made")


def _require(parts: list[Any], origin: Origin) -> None:
    """Raise UsageError where the data whose vocabulary is wanted isn't here."""
    from launcher.runs.follow.run_files import near_data

    for prefix in (_prefix(part) for part in parts if isinstance(part, str)):
        if not os.path.exists(f"{prefix}.idx"):
            raise UsageError(
                f"{origin.place('data.path')}: no such file: {prefix}.idx",
                f"{near_data(prefix)}\n  For data that isn't on this machine, set data.vocab_size.",
            )


def _prefix(part: str) -> Path:
    return expanded(part.removesuffix(".bin").removesuffix(".idx")).absolute()


def _how_made(prefix: str) -> dict[str, Any] | None:
    """What is kept of how data files were made; None where nothing is, or they aren't here."""
    from launcher.runs.datasets import indexed

    path = _prefix(prefix)
    with suppress(OSError, indexed.DamagedDataset):
        index = indexed.read_index(path)
        return indexed.how_made(path, index.documents, index.tokens)
    return None


def _upstreams(made: Any, size: int, release: str | None) -> dict[str, Any]:
    """The keys for upstream's program: the tokenizer's files, or its size alone."""
    files = {"vocab_file": "vocab_file", "merge_file": "merge_file", "model": "tokenizer_model"}
    found = {name: made.get(key) for key, name in files.items() if made.get(key)}
    if "vocab_file" in found and series.has(release, "vocabularies are the hub's"):
        found = {}
    if found and all(Path(path).is_absolute() and Path(path).exists() for path in found.values()):
        return {"tokenizer_type": made["type"], "vocab_size": size, **found}
    size -= null_adds_one(release)
    return {"tokenizer_type": "NullTokenizer", "vocab_size": size}


def _gives_way(data: Data, origin: Origin, size: int) -> bool:
    """Whether the vocabulary of a run file gives way to that of its data, which has `size` tokens.

    So does a preset's, which is of the preset's own data, and one that is too small beside
    data.mock, whose made-up tokens it is of.
    """
    key = "data.vocab_size"
    mocks = data.mock and key not in origin.overrides and (data.vocab_size or 0) < size
    return data.vocab_size is None or mocks or origin.is_presets(key)


def _vocabulary(data: Data, origin: Origin, found: PreparedText) -> int:
    """The size that the model is made for. Raises UsageError where the tokens don't fit in it."""
    size, key = found.vocab_size, "data.vocab_size"
    if data.vocab_size is None or _gives_way(data, origin, size):
        return size
    if data.vocab_size < size:
        raise UsageError(
            f"{origin.place(key)}: {data.vocab_size} is too small: {found.job.tokenizer.type} "
            f"has tokens up to {size - 1}",
            f"Leave it out, or give at least {size}.",
        )
    return data.vocab_size


def chosen_by(data: Data, release: str | None = None) -> TokenizerChoice:
    """The tokenizer that the keys of a run file name, by the rules of a release."""
    from launcher.tools.data.tokenizers import TokenizerChoice

    def path(name: str | None) -> Path | None:
        return Path(name) if name else None

    return TokenizerChoice(
        type=data.tokenizer_type or TokenizerChoice.type,
        vocab_file=path(data.vocab_file),
        merge_file=path(data.merge_file),
        model=path(data.tokenizer_model),
        megatron=release or TokenizerChoice.megatron,
    )
