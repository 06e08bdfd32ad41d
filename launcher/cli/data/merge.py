"""`launcher data merge`: shards to one .bin and .idx."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = "join .bin and .idx of shards, in the order given"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("prefixes", metavar="P", nargs="+", type=Path, help="of each, or P.*_document.idx")
    add("--output-prefix", metavar="OUT", type=Path, required=True, help="OUT.bin and OUT.idx")


def main(args: argparse.Namespace) -> int:
    """Join them, and say what was written."""
    from launcher.data.contents import merge

    made = merge([prefix.expanduser() for prefix in args.prefixes], args.output_prefix.expanduser())
    print(f"{made.documents:,} documents, {made.tokens:,} tokens: {args.output_prefix}.bin")
    return 0
