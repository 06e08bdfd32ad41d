"""`launcher data merge`: shards to one .bin and .idx."""

from __future__ import annotations

import argparse
import os
from glob import glob, has_magic
from pathlib import Path

from launcher.cli.data import inputs

HELP = "join .bin and .idx of shards, in the order given"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("prefixes", metavar="P", nargs="+", help="of each, or P.idx, or a 'pattern*' of them")
    add("--output-prefix", metavar="OUT", required=True, help="OUT.bin and OUT.idx")


def main(args: argparse.Namespace) -> int:
    """Join them, and say what was written."""
    from launcher.data.contents import merge

    target = inputs.target("--output-prefix", args.output_prefix)
    made = merge([path for given in args.prefixes for path in _named(given)], target)
    print(f"{made.documents:,} documents, {made.tokens:,} tokens: {target}.bin")
    return 0


def _named(given: str) -> list[Path]:
    """The prefix, or those that a pattern means, sorted; of both files of one it is named once.

    Raises UsageError for a pattern that means none.
    """
    from launcher.errors import UsageError

    path = os.path.expanduser(given)
    if os.path.exists(path) or os.path.exists(f"{path}.idx") or not has_magic(path):
        return [Path(path)]
    names = (os.path.splitext(name) for name in glob(path) + glob(f"{path}.idx"))
    if found := {name for name, suffix in names if suffix in (".bin", ".idx")}:
        return [*map(Path, sorted(found))]
    raise UsageError(f"{given}: no such file", "Name each file, or give a pattern that fits.")
