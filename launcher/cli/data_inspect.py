"""`launcher data inspect` and `vocab`: what is in data files, and what tokens stand for."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.command import argument, command
from launcher.errors import UsageError
from launcher.screen import printable

if TYPE_CHECKING:
    from launcher.data.contents import Data, Sizes
    from launcher.data.tokenizers import Chosen, Tokenizer

WIDTH = 40
"""Columns of the longest bar."""

ALPHABET = """\
vocab.json isn't garbled: its tokens are bytes, and each byte is written as one visible character.
Letters, digits and signs stand for themselves, Ġ is the space, Ċ the line feed, and the bytes of
other scripts look like Ã or ä. A Chinese character has three bytes, so it is up to three tokens."""

TYPES = (
    *("GPT2BPETokenizer", "HuggingFaceTokenizer", "Llama2Tokenizer"),
    *("GPTSentencePieceTokenizer", "TikTokenizer"),
)
TOKENIZER = (
    argument("--tokenizer-type", "%(default)s, or:", choices=TYPES, default=TYPES[0]),
    argument("--vocab-file", "vocab.json (GPT-2's own)", "FILE", type=Path),
    argument("--merge-file", "merges.txt (GPT-2's own)", "FILE", type=Path),
    argument("--tokenizer-model", "tokenizer.json, .model, ranks", "FILE", type=Path),
    argument("--eod-token", "of a tokenizer.json, else its eos_token", "TOKEN"),
    argument("--vocab-size", "of TikTokenizer (131072)", "N", type=int),
    argument("--tiktoken-pattern", "of TikTokenizer (v2)", choices=("v1", "v2")),
    argument("--tiktoken-num-special-tokens", "of TikTokenizer (1000)", "N", type=int),
    argument("--megatron", "whose rules hold (%(default)s)", "RELEASE", default="0.9.0"),
)
"""Which tokenizer; the names are upstream's where it has them."""


def tokenizer(args: Namespace) -> Chosen:
    """The tokenizer that the options name."""
    from launcher.data.tokenizers import Chosen

    return Chosen(
        type=args.tokenizer_type,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        model=args.tokenizer_model,
        end=args.eod_token,
        vocab_size=args.vocab_size,
        pattern=args.tiktoken_pattern,
        special_tokens=args.tiktoken_num_special_tokens,
        megatron=args.megatron,
    )


def a_path(text: str) -> Path:
    """A path; ~ in it is a home folder."""
    return Path(os.path.expanduser(text))


@command(
    argument("prefix", "the files' name without .bin and .idx", "P", type=a_path),
    argument("--compare", "say whether P2 has the same bytes; 1 if not", "P2", type=a_path),
    argument("--documents", "how many to show (3)", "N", type=int, default=3),
    *TOKENIZER,
)
def inspect(args: Namespace) -> int:
    """Check a .bin and .idx, count, show the lengths and the first documents; compare two."""
    from launcher.data import contents, tokenizers

    data = contents.open_data(args.prefix)
    if args.compare:
        other = contents.open_data(args.compare)
        said = contents.difference(data, other)
        print(f"they differ in {said}" if said else "the same bytes")
        return 1 if said else 0
    found = contents.sizes(data)
    print("\n".join([*_counts(data, found), "", *_histogram(found)]))
    if shown := range(min(args.documents, data.documents)):
        loaded = tokenizers.load_tokenizer(tokenizer(args))
        for number in shown:
            print(f"\ndocument {number}:\n{_shown(loaded, data, number)}")
    return 0


def _counts(data: Data, found: Sizes) -> list[str]:
    mean = data.tokens / data.documents if data.documents else 0
    return [
        f"documents  {data.documents:,}" + (f", {found.empty:,} empty" if found.empty else ""),
        f"sequences  {data.sequences:,}",
        f"tokens     {data.tokens:,} of {data.kind.itemsize} bytes",
        f"lengths    {found.shortest:,} to {found.longest:,} tokens, {mean:,.1f} on average",
        "index      fits the .bin: every entry was checked",
        *_how_made(data),
    ]


def _how_made(data: Data) -> list[str]:
    """The tokenizer and the release whose rule made the tokens, where a record says so."""
    from launcher.data import contents

    if not (said := contents.how_made(data)):
        return []
    chosen = said["tokenizer"]
    rule = printable(f"{chosen['type']}, by the rule of Megatron {chosen['megatron']}")
    return [f"tokenizer  {rule}"]


def _histogram(found: Sizes) -> list[str]:
    """A line for each power of two, from the first that has a document."""
    most = max(found.bars)
    mark = "█" if sys.stdout.encoding.lower().startswith("utf") else "#"
    lines: list[str] = []
    for power, count in enumerate(found.bars):
        if not count and not lines:
            continue
        least = 0 if power == 0 else 1 << (power - 1)
        bar = mark * -(-count * WIDTH // most)
        lines.append(f"{least:>11,}+ {bar:<{WIDTH}} {count:,}")
    return ["tokens       documents", *lines] if lines else []


def _shown(tokenizer: Tokenizer, data: Data, number: int) -> str:
    """A document's beginning as text, or its tokens where the vocabulary can't be theirs."""
    tokens = data.document(number, 100)
    for token in (min(tokens, default=0), max(tokens, default=0)):
        if not 0 <= token < tokenizer.size:
            return f"{tokens}\n  (token {token}, and the vocabulary has {tokenizer.size})"
    return tokenizer.decode(tokens)


@command(
    argument("texts", "a text to tokenize", "TEXT", nargs="*"),
    argument("--from", "first token shown (250)", "N", dest="first", type=int, default=250),
    argument("--count", "how many are shown (20)", "N", type=int, default=20),
    *TOKENIZER,
)
def vocab(args: Namespace) -> int:
    """Check vocab.json and merges.txt, and show what their tokens stand for."""
    from launcher.data import tokenizers
    from launcher.data.faults import Refused

    for option, number in (("--from", args.first), ("--count", args.count)):
        if number < 0:
            raise UsageError(f"{option} {number}: tokens are counted from 0")
    for text in args.texts:
        if text != text.encode(errors="ignore").decode():  # Python puts surrogates for bytes
            raise UsageError(f"{text!a}: not UTF-8", "iconv -t UTF-8 converts a text.")
    chosen = tokenizer(args)
    if not args.texts and chosen.type == "GPT2BPETokenizer":
        _explain(tokenizers.tokenizer_files(chosen), args.first, args.count)
        return 0
    loaded = tokenizers.load_tokenizer(chosen)
    if not args.texts:
        print(f"tokens 0 to {loaded.size - 1}, end of document {loaded.end}")
    for text in args.texts:
        try:
            (tokens,) = tokenizers.encoded(loaded, [text])
        except Refused as refused:
            raise UsageError(f"{text!r}: {refused}") from None
        for token in map(int, tokens):
            print(f"{token:>7}  {loaded.decode([token])!r}")
    return 0


def _explain(files: Sequence[Path], first: int, count: int) -> None:
    """Check vocab.json and merges.txt, and show what some of the tokens stand for."""
    from launcher.data import vocabulary

    found = vocabulary.load_vocabulary(*files)
    for path, digest in zip(files, found.sha256, strict=True):
        print(f"{path}\n  sha256 {digest}")
    print("GPT-2's genuine vocabulary" if found.genuine else "not GPT-2's own, but consistent")
    print(f"{len(found.ids)} tokens, {len(found.merges)} merges, end of document {found.end}\n")
    print(f"{ALPHABET}\n\n{'token':>7}  {'in vocab.json':<20} stands for")
    names = {number: name for name, number in found.ids.items()}
    for number in range(first, min(first + count, len(names))):
        print(f"{number:>7}  {names[number]:<20} {_stands_for(names[number])}")


def _stands_for(token: str) -> str:
    """A token's text in quotes, or its bytes where they are part of a character."""
    from launcher.data import vocabulary

    if token == vocabulary.END:
        return "the end of a document"
    try:
        content = vocabulary.decoded(token)
    except KeyError:
        return "itself: it isn't made of bytes"
    try:
        return repr(content.decode())
    except UnicodeDecodeError:
        return f"bytes {content.hex(' ')}"
