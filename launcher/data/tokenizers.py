"""Tokenizers, by upstream's names: each turns texts into the tokens that upstream makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from launcher.data import vocabulary
from launcher.errors import UsageError, nearest

Tokens: TypeAlias = NDArray[np.generic]


@dataclass(frozen=True)
class Chosen:
    """Which tokenizer, by the options that upstream's tools have for it.

    `model` is the file of any but GPT-2's; the last three are of TikTokenizer.
    """

    type: str = "GPT2BPETokenizer"
    vocab_file: Path | None = None
    merge_file: Path | None = None
    model: Path | None = None
    end: str | None = None
    vocab_size: int | None = None
    pattern: str = "v2"
    special_tokens: int = 1000


class Tokenizer(Protocol):
    """What a job asks for: `size` without padding, `end` the end-of-document token or None."""

    size: int
    end: int | None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what isn't UTF-8 is replaced."""


class Gpt2:
    """Byte-level BPE of a vocab.json and merges.txt."""

    def __init__(self, chosen: Chosen) -> None:
        import orjson
        from gigatoken.gigatoken_rs import load_hf_json

        found = vocabulary.load(*vocabulary.files(chosen.vocab_file, chosen.merge_file))
        self.size, self.end, self.genuine = len(found.ids), found.end, found.genuine
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
        model = {"type": "BPE", "vocab": found.ids, "merges": found.merges}
        self._encoder = load_hf_json(
            orjson.dumps(
                {
                    "version": "1.0",
                    "added_tokens": [],  # <|endoftext|> in a text is ordinary text
                    "pre_tokenizer": level | {"trim_offsets": True},
                    "decoder": level | {"trim_offsets": True},
                    "model": model | {"byte_fallback": False, "ignore_merges": False},
                }
            )
        )
        text, tokens = vocabulary.KNOWN
        if self.genuine and self._encoder.encode(text).tolist() != tokens:
            raise UsageError(f"{text!r} isn't {tokens} in GPT-2's vocabulary: a broken gigatoken")

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        return [*map(self._encoder.encode, texts)]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        found: bytes = self._encoder.decode([*tokens])
        return found.decode(errors="replace")


class HuggingFace:
    """Any tokenizer.json, with the special tokens that it puts around a text."""

    def __init__(self, chosen: Chosen) -> None:
        import tokenizers

        path = _model(chosen, "tokenizer.json")
        try:
            self._encoder = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise UsageError(f"{path}: no tokenizer.json: {error}") from None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.size = self._encoder.get_vocab_size()
        self.end = _end_of(path, chosen.end, self._encoder.token_to_id)

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        found = self._encoder.encode_batch_fast([*texts])
        return [np.array(one.ids, np.uint32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._encoder.decode([*tokens], skip_special_tokens=False))


class SentencePiece:
    """A tokenizer.model, with the begin token before each text (Llama 2) or without."""

    def __init__(self, chosen: Chosen) -> None:
        import sentencepiece

        path = _model(chosen, "tokenizer.model")
        self._encoder = sentencepiece.SentencePieceProcessor()
        try:
            self._encoder.Load(str(path))
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{path}: no SentencePiece model: {error}") from None
        self.size = self._encoder.get_piece_size()
        self.end = self._encoder.eos_id() if self._encoder.eos_id() >= 0 else None
        self._begins = chosen.type == "Llama2Tokenizer"

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        found = self._encoder.encode([*texts], add_bos=self._begins, num_threads=1)
        return [np.array(one, np.int32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._encoder.decode([*map(int, tokens)]))


class Tiktoken:
    """A .json of ranks as upstream's TikTokenizer reads it; special tokens come before them."""

    def __init__(self, chosen: Chosen) -> None:
        import base64
        import json

        import tiktoken

        path = _model(chosen, "a .json of ranks")
        self.size = chosen.vocab_size or 1 << 17
        special = chosen.special_tokens
        try:
            ranks = json.loads(path.read_bytes())[: self.size - special]
            merges = {base64.b64decode(one["token_bytes"]): one["rank"] for one in ranks}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: no list of rank, token_bytes: {error}") from None
        if sorted(merges.values()) != list(range(self.size - special)):
            raise UsageError(
                f"{path}: {len(merges)} ranks, and {self.size - special} of {self.size} are wanted",
                f"Say the size: --vocab-size {len(merges) + special}",
            )
        names = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{n}>" for n in range(3, special))]
        self.end = names.index("</s>")
        self._encoder = tiktoken.Encoding(
            path.stem,
            pat_str=PATTERNS[chosen.pattern],
            mergeable_ranks={token: rank + special for token, rank in merges.items()},
            special_tokens={name: at for at, name in enumerate(names)},
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        return [np.array(self._encoder.encode_ordinary(text), np.int32) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self._encoder.decode([*map(int, tokens)])


PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How a text is divided before its ranks are looked up: the two patterns that upstream names."""

KNOWN: dict[str, Callable[[Chosen], Any]] = {
    "GPT2BPETokenizer": Gpt2,
    "HuggingFaceTokenizer": HuggingFace,
    "Llama2Tokenizer": SentencePiece,
    "GPTSentencePieceTokenizer": SentencePiece,
    "TikTokenizer": Tiktoken,
}


def load(chosen: Chosen) -> Tokenizer:
    """Make the tokenizer. Raises UsageError for one that isn't known, or files that don't fit."""
    if chosen.type not in KNOWN:
        raise UsageError(f"--tokenizer-type {chosen.type}", nearest(chosen.type, list(KNOWN)))
    made: Tokenizer = KNOWN[chosen.type](chosen)
    return made


def _model(chosen: Chosen, what: str) -> Path:
    if chosen.model is None:
        raise UsageError(f"{chosen.type} without a file", f"--tokenizer-model {what}")
    path = chosen.model.expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise UsageError(f"{path}: no such file", f"--tokenizer-model wants {what}.")
    return path


def _end_of(path: Path, given: str | None, find: Callable[[str], int | None]) -> int | None:
    """The end-of-document token: as given, or what tokenizer_config.json beside it says."""
    import json

    name = given
    config = path.with_name("tokenizer_config.json")
    if name is None and config.is_file():
        said = json.loads(config.read_bytes()).get("eos_token")
        name = said.get("content") if isinstance(said, dict) else said
    if name is None:
        return None
    if (found := find(name)) is None:
        raise UsageError(f"{path}: no token {name!r}", "--eod-token names the one that ends.")
    return found
