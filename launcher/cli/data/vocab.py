"""`launcher data vocab`: explains and checks vocab.json and merges.txt."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.data import vocabularies

HELP = "check vocab.json and merges.txt, and show what their tokens stand for"

ALPHABET = """\
vocab.json isn't garbled: its tokens are bytes, and each byte is written as one visible character.
Letters, digits and signs stand for themselves, Ġ is the space, Ċ the line feed, and the bytes of
other scripts look like Ã or ä. A Chinese character has three bytes, so it is up to three tokens."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("texts", metavar="TEXT", nargs="*", help="a text to tokenize")
    add("--from", dest="first", metavar="N", type=int, default=250, help="first token shown (250)")
    add("--count", metavar="N", type=int, default=20, help="how many are shown (20)")
    vocabularies.arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Explain, check and show; a text's tokens where there are texts."""
    from launcher.data import tokenizers
    from launcher.data.faults import Refused
    from launcher.errors import UsageError

    for option, number in (("--from", args.first), ("--count", args.count)):
        if number < 0:
            raise UsageError(f"{option} {number}: tokens are counted from 0")
    for text in args.texts:
        _require_text(text)
    chosen = vocabularies.chosen(args)
    if not args.texts and chosen.type == "GPT2BPETokenizer":
        _explain(tokenizers.files(chosen), args.first, args.count)
        return 0
    tokenizer = tokenizers.load(chosen)
    if not args.texts:
        print(f"tokens 0 to {tokenizer.size - 1}, end of document {tokenizer.end}")
    for text in args.texts:
        try:
            (tokens,) = tokenizers.encoded(tokenizer, [text])
        except Refused as refused:
            raise UsageError(f"{text!r}: {refused}") from None
        for token in map(int, tokens):
            print(f"{token:>7}  {tokenizer.decode([token])!r}")
    return 0


def _explain(files: Sequence[Path], first: int, count: int) -> None:
    """Check vocab.json and merges.txt, and show what some of the tokens stand for."""
    from launcher.data import vocabulary

    found = vocabulary.load(*files)
    for path, digest in zip(files, found.sha256, strict=True):
        print(f"{path}\n  sha256 {digest}")
    print("GPT-2's genuine vocabulary" if found.genuine else "not GPT-2's own, but consistent")
    print(f"{len(found.ids)} tokens, {len(found.merges)} merges, end of document {found.end}\n")
    print(f"{ALPHABET}\n\n{'token':>7}  {'in vocab.json':<20} stands for")
    names = {number: name for name, number in found.ids.items()}
    for number in range(first, min(first + count, len(names))):
        print(f"{number:>7}  {names[number]:<20} {_stands_for(names[number])}")


def _require_text(argument: str) -> None:
    """Raises UsageError where it wasn't UTF-8: Python puts surrogates in the place of bytes."""
    from launcher.errors import UsageError

    try:
        argument.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{argument!a}: not UTF-8", "iconv -t UTF-8 converts a text.") from None


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
