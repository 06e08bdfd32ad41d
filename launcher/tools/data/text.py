"""Tokenizes `data.text` before a run, and sets data.path to the result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.runs.runfile.config import Data, RunConfig
from launcher.runs.runfile.source import Origin

if TYPE_CHECKING:
    from launcher.tools.data.prepared import PreparedText
    from launcher.tools.data.tokenizers import TokenizerChoice


@dataclass(frozen=True)
class TokenizedRun:
    """A run's configuration with `data.path` in the place of `data.text`, and how that is made."""

    config: RunConfig
    text: PreparedText | None = None

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
        return TokenizedRun(config)
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


def _vocabulary(data: Data, origin: Origin, found: PreparedText) -> int:
    """The size that the model is made for. Raises UsageError where the tokens don't fit in it."""
    size, key = found.vocab_size, "data.vocab_size"
    if data.vocab_size is None or origin.is_presets(key):
        return size
    if data.vocab_size < size:
        raise UsageError(
            f"{origin.place(key)}: {data.vocab_size}, and {found.job.tokenizer.type} has tokens up "
            f"to {size - 1}",
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
