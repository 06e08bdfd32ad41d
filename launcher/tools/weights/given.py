"""Finds the checkpoint that a user names by run or folder, and its tokenizer."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import EngineError, LauncherError, UsageError
from launcher.base.settings import expanded
from launcher.runs.follow.shell import in_image
from launcher.runs.records import record
from launcher.runs.runfile.config import RunConfig
from launcher.tools.data import data_text
from launcher.tools.weights import reader
from launcher.tools.weights.reader import KEPT

if TYPE_CHECKING:
    from launcher.tools.data.tokenizers import TokenizerChoice

INSIDE = "/checkpoint"
PROGRAM = "launcher.trainer.generate"
TOKENS = re.compile(r"^tokens:((?: \d+)*)\s*$", re.MULTILINE)
"""What that prints."""

LINES = 20
"""Of what it printed, where it fails."""

KINDS = {
    "tokenizer.json": "HuggingFaceTokenizer",
    "tokenizer.model": "Llama2Tokenizer",
    "vocab.json": "GPT2BPETokenizer",
}
"""The file by which a folder's tokenizer is known."""


@dataclass(frozen=True)
class NamedCheckpoint:
    """A checkpoint's folder, and the run file of the run that saved it, where one was named."""

    folder: Path
    config: RunConfig | None = None
    cwd: str = ""


def named(given: str) -> NamedCheckpoint:
    """The newest complete checkpoint of a folder, or of a run. Raises UsageError."""
    folder = expanded(given)
    if folder.is_dir():
        return NamedCheckpoint(reader.find(folder.absolute()))
    if "/" in given:
        raise UsageError(f"{given}: no such folder")
    kept = record.find(given)
    config = kept.asked().config
    if not config.checkpoint.save:
        raise UsageError(f"run {kept.run} saved no checkpoints", "Set checkpoint.save.")
    return NamedCheckpoint(
        reader.find(Path(kept.cwd, expanded(config.checkpoint.save))), config, kept.cwd
    )


def tokenizer(source: NamedCheckpoint, given: TokenizerChoice | None) -> TokenizerChoice | None:
    """The tokenizer as given, as it lies with an imported checkpoint, or as the run file has it."""
    if given:
        return given
    from launcher.tools.data.tokenizers import TokenizerChoice

    place = source.folder.parent / KEPT
    for name, kind in KINDS.items():
        if (place / name).is_file():
            if kind == "GPT2BPETokenizer":
                return TokenizerChoice(vocab_file=place / name, merge_file=place / "merges.txt")
            return TokenizerChoice(type=kind, model=place / name)
    if not source.config:
        return None
    data = source.config.data
    if data.vocab_file or data.tokenizer_type or data.tokenizer_model:
        return data_text.chosen_by(data)
    paths = [data.path] if isinstance(data.path, str) else data.path or []
    return next(filter(None, (_made_by(Path(source.cwd, expanded(str(at)))) for at in paths)), None)


def _made_by(prefix: Path) -> TokenizerChoice | None:
    """The tokenizer that made data files, where a record beside them says so."""
    from launcher.tools.data import contents

    with suppress(LauncherError):
        return contents.made_by(contents.open_data(prefix))
    return None


def files_of(chosen: TokenizerChoice) -> dict[str, Path]:
    """The files of a tokenizer, by the names that transformers looks for. Raises UsageError."""
    from launcher.tools.data import tokenizers

    found = tokenizers.tokenizer_files(chosen)
    names = {kind: [name] for name, kind in KINDS.items()}
    names |= {"GPT2BPETokenizer": ["vocab.json", "merges.txt"]}
    if chosen.type not in names:
        return {}
    files = dict(zip(names[chosen.type], found, strict=True))
    beside = found[0].with_name("tokenizer_config.json")
    return files | ({beside.name: beside} if beside.is_file() else {})


def generate(
    source: NamedCheckpoint,
    tokens: Sequence[int],
    count: int,
    image: object,
    backend: str,
    gpus: str,
) -> list[int]:
    """`count` tokens after these, each the likeliest, by the program in an image.

    Raises EngineError where that fails, after printing the reason.
    """
    mount = {"source": str(source.folder), "target": INSIDE}
    local = backend == "local"
    where = str(source.folder) if local else INSIDE
    runner = ["runner", *(["--cpu"] if gpus == "0" else [])]
    program = ["-m", PROGRAM, "--load", where, "--count", str(count), "--ids", *map(str, tokens)]
    argv = [*runner, "--processes-per-node", "1", "--", *program]
    values: dict[str, object] = {"name": "generate", "mounts": [] if local else [mount]}
    done = in_image(image, backend, gpus, values, argv, subprocess.PIPE, by_payload=True)
    found = TOKENS.search(done.stdout)
    if done.returncode or not found:
        print("\n".join(done.stdout.splitlines()[-LINES:]), file=sys.stderr)
        raise EngineError(f"{PROGRAM} failed with {done.returncode}", "The reason stands above.")
    return [int(word) for word in found[1].split()]
