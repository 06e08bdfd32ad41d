"""`launcher data inspect`: what is in a .bin and .idx, and whether they fit."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.cli.data import vocabularies

if TYPE_CHECKING:
    from launcher.data.contents import Data, Sizes
    from launcher.data.tokenizers import Tokenizer

HELP = "check a .bin and .idx, count, show the lengths and the first documents; compare two"

WIDTH = 40
"""Columns of the longest bar."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("prefix", metavar="P", type=_path, help="the files' name without .bin and .idx")
    add("--compare", metavar="P2", type=_path, help="say whether P2 has the same bytes; 1 if not")
    add("--documents", metavar="N", type=int, default=3, help="how many to show (3)")
    vocabularies.arguments(parser)


def main(args: argparse.Namespace) -> int:
    """Check and show, or compare; 1 where the two differ."""
    from launcher.data import contents, tokenizers

    data = contents.opened(args.prefix)
    if args.compare:
        other = contents.opened(args.compare)
        said = contents.difference(data, other)
        print(f"they differ in {said}" if said else "the same bytes")
        return 1 if said else 0
    found = contents.sizes(data)
    print("\n".join([*_counts(data, found), "", *_histogram(found)]))
    if shown := range(min(args.documents, data.documents)):
        tokenizer = tokenizers.load(vocabularies.chosen(args))
        for number in shown:
            print(f"\ndocument {number}:\n{_shown(tokenizer, data, number)}")
    return 0


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def _counts(data: Data, found: Sizes) -> list[str]:
    mean = data.tokens / data.documents if data.documents else 0
    return [
        f"documents  {data.documents:,}" + (f", {found.empty:,} empty" if found.empty else ""),
        f"sequences  {data.sequences:,}",
        f"tokens     {data.tokens:,} of {data.kind.itemsize} bytes",
        f"lengths    {found.shortest:,} to {found.longest:,} tokens, {mean:,.1f} on average",
        "index      fits the .bin: every entry was checked",
    ]


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
