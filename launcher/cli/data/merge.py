"""`launcher data merge`: shards to one .bin and .idx."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from launcher.cli.data import inputs

HELP = "join .bin and .idx of shards, in the order given"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("prefixes", metavar="P", nargs="+", type=Path, help="of each, or P.*_document.idx")
    add("--output-prefix", metavar="OUT", required=True, help="OUT.bin and OUT.idx")


def main(args: argparse.Namespace) -> int:
    """Join them, and say what was written."""
    from launcher.data.contents import merge

    target = inputs.target("--output-prefix", args.output_prefix)
    made = merge([Path(os.path.expanduser(prefix)) for prefix in args.prefixes], target)
    print(f"{made.documents:,} documents, {made.tokens:,} tokens: {target}.bin")
    return 0
