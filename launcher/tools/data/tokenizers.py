"""Tokenizers, by upstream's names: each turns texts into the tokens that upstream makes of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from launcher.agent import series
from launcher.base.errors import UsageError, nearest
from launcher.tools.data import kinds, vocabulary
from launcher.tools.data.faults import RecordRefusal

Tokens: TypeAlias = NDArray[np.generic]

PIECE = 1 << 16
"""Characters that GPT-2's BPE has at a time: what it keeps for them fits a processor's caches."""
LEFT = 64
"""Tokens of a piece that the next one makes anew, for what follows may change the last of them."""
CONTRACTION = re.compile("'[dlmrstv]")
"""How 's, 't, 're, 've, 'm, 'll and 'd begin."""


RELEASE = "0.9.0"
"""The Megatron release whose rules hold where none is named."""


@dataclass(frozen=True)
class TokenizerRule:
    """What a release of Megatron does with special tokens, without options of its own for them.

    begins: a text gets those that the model puts around it, such as the begin token
    named: the name of one in a text is that token; else it is ordinary text
    """

    begins: bool = False
    named: bool = False


NAMED = "special tokens by name"
RULES = {
    "GPT2BPETokenizer": ("", NAMED),
    "HuggingFaceTokenizer": ("HuggingFaceTokenizer adds special tokens", ""),
    "Llama2Tokenizer": ("Llama2Tokenizer begins texts", ""),
    "GPTSentencePieceTokenizer": ("", ""),
    "TikTokenizer": ("", NAMED),
}
"""Of each tokenizer, the facts of a series by which it begins a text, and knows tokens by name."""


@dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, by the options that upstream's tools have for it; None where not given.

    `model` is the file of any but GPT-2's, `end` of HuggingFaceTokenizer, the next three of
    TikTokenizer; `megatron` is the release whose rules hold.
    """

    type: str = "GPT2BPETokenizer"
    vocab_file: Path | None = None
    merge_file: Path | None = None
    model: Path | None = None
    end: str | None = None
    vocab_size: int | None = None
    pattern: str | None = None
    special_tokens: int | None = None
    megatron: str = RELEASE


def rule(chosen: TokenizerChoice) -> TokenizerRule:
    """What the release does. Raises UsageError for what is no release."""
    if not re.fullmatch(r"\d+\.\d+(\D.*)?", chosen.megatron):
        raise UsageError(f"--megatron {chosen.megatron}: no release", "--megatron 0.16.1")
    held = (bool(fact) and series.has(chosen.megatron, fact) for fact in RULES[chosen.type])
    return TokenizerRule(*held)


class Tokenizer(Protocol):
    """What a job asks for: `size`, one more than the highest token, and `end`, that of documents.

    `end` is None where there is none.
    """

    size: int
    end: int | None

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what isn't UTF-8 is replaced."""


def encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    """The tokens of each text. Raises RecordRefusal where the tokenizer's library fails at one."""
    try:
        return tokenizer.encode(texts)
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # PyO3's panics are no Exception
        raise RecordRefusal(f"the tokenizer fails: {error}") from None


class Gpt2:
    """Byte-level BPE of a vocab.json and merges.txt."""

    def __init__(self, chosen: TokenizerChoice) -> None:
        import orjson
        from gigatoken.gigatoken_rs import load_hf_json

        found = vocabulary.load_vocabulary(
            *vocabulary.vocabulary_files(chosen.vocab_file, chosen.merge_file)
        )
        self.size, self.end, self.genuine = len(found.ids), found.end, found.genuine
        self._named = rule(chosen).named
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
        return [*map(self._with_ends if self._named else self._in_pieces, texts)]

    def _with_ends(self, text: str) -> Tokens:
        """The tokens of a text in which the name of the end-of-document token stands for it."""
        first, *rest = map(self._in_pieces, text.split(vocabulary.END))
        end = np.array([self.end], first.dtype)
        return np.concatenate([first, *(part for one in rest for part in (end, one))])

    def _in_pieces(self, text: str) -> Tokens:
        """The tokens of a text; encoded at once, a long word's time would outgrow its length.

        BPE merges the neighbours of lowest rank first, so whether one token is merged with the next
        depends on these two alone: tokens are a word's if each two that follow one another are what
        BPE makes of the two. So a piece's tokens hold up to any with which the next piece, begun
        there, begins as well.
        """
        begin, size = 0, PIECE
        piece: Tokens = self._encoder.encode(text[:size])
        if size >= len(text):
            return piece
        found = []
        while begin + size < len(text):
            at, cut = self._cut(piece, text, begin + size)
            following = self._encoder.encode(text[cut : cut + PIECE])
            if at and following[0] == piece[at]:
                found.append(piece[:at])
                begin, size, piece = cut, PIECE, following
            else:
                size *= 2
                piece = self._encoder.encode(text[begin : begin + size])
        return np.concatenate([*found, piece])

    def _cut(self, piece: Tokens, text: str, end: int) -> tuple[int, int]:
        """Which token of a piece that ends at `end` the next may begin with, and where; 0: none.

        That is one that begins with a character, and not near a contraction: "'ll" is a word of its
        own, but not at the end of "?'ll", and without its apostrophe "lla" is a word.
        """
        last = len(piece) - LEFT
        for at in range(last, max(last - LEFT, 0), -1):
            with suppress(UnicodeDecodeError):
                cut = end - len(self._encoder.decode(piece[at:].tolist()).decode())
                if not CONTRACTION.search(text, cut - 2, cut + 2):
                    return at, cut
        return 0, end

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        found: bytes = self._encoder.decode([*tokens])
        return found.decode(errors="replace")


class HuggingFace:
    """Any tokenizer.json, with the special tokens that it puts around a text or without."""

    def __init__(self, chosen: TokenizerChoice) -> None:
        import tokenizers

        path = _model(chosen)
        try:
            self._encoder = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no narrower one
            raise UsageError(f"{path}: no tokenizer.json: {error}") from None
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self.size = 1 + max(self._encoder.get_vocab().values(), default=-1)  # there may be gaps
        self.end = _end_of(path, chosen.end, self._encoder.token_to_id)
        self._begins = rule(chosen).begins

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        found = self._encoder.encode_batch_fast([*texts], add_special_tokens=self._begins)
        return [np.array(one.ids, np.uint32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._encoder.decode([*tokens], skip_special_tokens=False))


class SentencePiece:
    """A tokenizer.model, with the begin token before each text or without."""

    def __init__(self, chosen: TokenizerChoice) -> None:
        import sentencepiece

        path = _model(chosen)
        self._encoder = sentencepiece.SentencePieceProcessor()
        try:
            self._encoder.Load(str(path))
        except (OSError, RuntimeError) as error:
            raise UsageError(f"{path}: no SentencePiece model: {error}") from None
        self.size = self._encoder.get_piece_size()
        self.end = self._encoder.eos_id() if self._encoder.eos_id() >= 0 else None
        self._begins = rule(chosen).begins

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        found = self._encoder.encode([*texts], add_bos=self._begins, num_threads=1)
        return [np.array(one, np.int32) for one in found]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._encoder.decode([*map(int, tokens)]))


class Tiktoken:
    """A .json of ranks as upstream's TikTokenizer reads it; special tokens come before them."""

    def __init__(self, chosen: TokenizerChoice) -> None:
        import tiktoken

        path = _model(chosen)
        self.size = 1 << 17 if chosen.vocab_size is None else chosen.vocab_size
        special = 1000 if chosen.special_tokens is None else chosen.special_tokens
        self._named = rule(chosen).named
        first = SPECIAL + MORE_SPECIAL if self._named else SPECIAL
        if not len(first) <= special < self.size:
            raise UsageError(
                f"--tiktoken-num-special-tokens {special}: there are at least {len(first)}, "
                f"{', '.join(first)}, and fewer than the {self.size} of --vocab-size"
            )
        merges = _ranks(path, self.size - special)
        names = [*first, *(f"<SPECIAL_{n}>" for n in range(len(first), special))]
        if len(merges) != self.size - special:
            raise UsageError(
                f"{path}: {len(merges)} ranks, and {self.size - special} of {self.size} are wanted",
                f"Say the size: --vocab-size {len(merges) + special}",
            )
        self.end = SPECIAL.index("</s>")
        self._encoder = tiktoken.Encoding(
            path.stem,
            pat_str=PATTERNS[chosen.pattern or "v2"],
            mergeable_ranks={token: rank + special for rank, token in enumerate(merges)},
            special_tokens={name: at for at, name in enumerate(names)},
        )

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text."""
        read = self._encoder.encode_ordinary
        if self._named:
            read = partial(self._encoder.encode, allowed_special="all")
        return [np.array(read(text), np.int32) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return self._encoder.decode([*map(int, tokens)])


def _ranks(path: Path, most: int) -> list[bytes]:
    """The first `most` tokens of a list of ranks, in order, as upstream wants it.

    Raises UsageError for another file.
    """
    import base64

    try:
        ranks = json.loads(path.read_bytes())[:most]
        merges = [base64.b64decode(one["token_bytes"]) for one in ranks]
        numbers = [one["rank"] for one in ranks]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path}: no list of rank, token_bytes: {error}") from None
    if numbers != [*range(len(ranks))] or len({*merges}) < len(merges):
        raise UsageError(f"{path}: its ranks aren't 0, 1, 2 and so on, each of another token")
    if merges[:256] != [bytes([byte]) for byte in range(min(256, most))]:
        raise UsageError(f"{path}: its first 256 ranks aren't the bytes in their order")
    return merges


SPECIAL = ("<unk>", "<s>", "</s>")
"""TikTokenizer's first tokens, which upstream wants to be there."""
MORE_SPECIAL = ("<mask>", "<pad>", "<cls>", "<sep>")
"""Those behind them where names stand for tokens."""

PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How a text is divided before its ranks are looked up: the two patterns that upstream names."""

KNOWN: dict[str, Callable[[TokenizerChoice], Any]] = {
    "GPT2BPETokenizer": Gpt2,
    "HuggingFaceTokenizer": HuggingFace,
    "Llama2Tokenizer": SentencePiece,
    "GPTSentencePieceTokenizer": SentencePiece,
    "TikTokenizer": Tiktoken,
}

MODELS = {
    "HuggingFaceTokenizer": "tokenizer.json",
    "Llama2Tokenizer": "tokenizer.model",
    "GPTSentencePieceTokenizer": "tokenizer.model",
    "TikTokenizer": "a .json of ranks",
}
"""What --tokenizer-model names."""

OPTIONS = {
    "vocab_file": ("--vocab-file", ("GPT2BPETokenizer",)),
    "merge_file": ("--merge-file", ("GPT2BPETokenizer",)),
    "model": ("--tokenizer-model", tuple(MODELS)),
    "end": ("--eod-token", ("HuggingFaceTokenizer",)),
    "vocab_size": ("--vocab-size", ("TikTokenizer",)),
    "pattern": ("--tiktoken-pattern", ("TikTokenizer",)),
    "special_tokens": ("--tiktoken-num-special-tokens", ("TikTokenizer",)),
}
"""What is given for each field of Chosen, and who reads it."""


def load_tokenizer(chosen: TokenizerChoice) -> Tokenizer:
    """Make the tokenizer.

    Raises UsageError for one that isn't known, options of another, and files that don't fit.
    """
    _require_known(chosen)
    made: Tokenizer = KNOWN[chosen.type](chosen)
    return made


def _require_known(chosen: TokenizerChoice) -> None:
    if chosen.type not in KNOWN:
        raise UsageError(f"--tokenizer-type {chosen.type}", nearest(chosen.type, list(KNOWN)))
    for field, (option, readers) in OPTIONS.items():
        if getattr(chosen, field) is not None and chosen.type not in readers:
            raise UsageError(
                f"{option}: {chosen.type} doesn't read it",
                f"Leave it out, or say which does: --tokenizer-type {' or '.join(readers)}",
            )
    rule(chosen)


def tokenizer_files(chosen: TokenizerChoice) -> Sequence[Path]:
    """What the tokenizer is read from, save what `end` is.

    Raises UsageError for one that isn't known, options of another, and files that aren't there.
    """
    _require_known(chosen)
    if chosen.type in MODELS:
        return [_model(chosen)]
    return vocabulary.vocabulary_files(chosen.vocab_file, chosen.merge_file)


def _model(chosen: TokenizerChoice) -> Path:
    what = MODELS[chosen.type]
    if chosen.model is None:
        raise UsageError(f"{chosen.type} without a file", f"--tokenizer-model {what}")
    path = Path(os.path.expanduser(chosen.model))
    if path.is_dir() and chosen.type == "HuggingFaceTokenizer":
        path = path / what
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "no such file"
        raise UsageError(f"{path}: {kind}", f"--tokenizer-model wants {what}.")
    kinds.refuse_ranks(path)
    return path


def _end_of(path: Path, given: str | None, find: Callable[[str], int | None]) -> int | None:
    """The end-of-document token: as given, or what tokenizer_config.json beside it says."""
    name = _said_end(path.with_name("tokenizer_config.json")) if given is None else given
    if name is None:
        return None
    try:
        found = find(name)
    except UnicodeEncodeError:  # an argument that wasn't UTF-8
        found = None
    if found is None:
        raise UsageError(f"{path}: no token {name!r}", "--eod-token names the one that ends.")
    return found


def _said_end(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json; None without one."""
    try:
        said = json.loads(config.read_bytes())
        end = said.get("eos_token")
        name = end.get("content") if isinstance(end, dict) else end
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError):
        raise UsageError(f"{config}: not a JSON object", "Mend it, or give --eod-token.") from None
    if name is not None and not isinstance(name, str):
        raise UsageError(f"{config}: eos_token is no token: {name!r}", "--eod-token names it.")
    return name
