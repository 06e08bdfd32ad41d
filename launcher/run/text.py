"""The text of a run: tokenized before it starts, and given to it as data.path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import UsageError
from launcher.run.config import Data, RunConfig

if TYPE_CHECKING:
    from launcher.data.tokenizers import Chosen


def tokenized(config: RunConfig, cache: Path, *, dry: bool = False) -> RunConfig:
    """The configuration with `data.path` in the place of `data.text`.

    The files lie in `data` in the launcher's cache, and are made where they aren't there: once for
    the same content, and not with `dry`. Raises UsageError for what can't be read, DataError for a
    document that can't be tokenized, ModuleNotFoundError where a package for it is missing.
    """
    data = config.data
    if data.text is None:
        if data.text_key is not None:
            raise UsageError("data.text_key without data.text", "Name the files: data.text.")
        return config
    if data.path is not None:
        raise UsageError("data.text and data.path: both say what is trained on", "Leave one out.")
    from launcher.cli.data import install

    install()
    from launcher.data import tokenizers
    from launcher.data.bar import Bar
    from launcher.data.prepared import prepared
    from launcher.data.sources import Reading

    chosen = _chosen(data)
    bar = Bar()
    texts = [str(Path(name).expanduser()) for name in data.text]
    prefix, done = prepared(
        texts,
        cache / "data",
        Reading(keys=(data.text_key or "text",)),
        chosen,
        len(os.sched_getaffinity(0)),
        bar,
        dry=dry,
    )
    if done:
        bar.end(done, [f"{prefix}.bin"])
    size = data.vocab_size or tokenizers.load(chosen).size
    given = {"path": str(prefix), "text": None, "text_key": None, "vocab_size": size}
    return config.model_copy(update={"data": data.model_copy(update=given)})


def _chosen(data: Data) -> Chosen:
    from launcher.data.tokenizers import Chosen

    def path(name: str | None) -> Path | None:
        return Path(name) if name else None

    return Chosen(
        type=data.tokenizer_type or Chosen.type,
        vocab_file=path(data.vocab_file),
        merge_file=path(data.merge_file),
        model=path(data.tokenizer_model),
    )
