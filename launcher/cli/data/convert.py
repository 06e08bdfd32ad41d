"""`launcher data convert`: tables and text to jsonl."""

from __future__ import annotations

import argparse

from launcher.cli.data import inputs

HELP = "make one jsonl of csv, parquet, plain text or other jsonl"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    inputs.arguments(parser)
    parser.add_argument("--output", "-o", metavar="FILE", required=True, help="a .jsonl")


def main(args: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    from launcher.data.bar import Bar
    from launcher.data.convert import convert

    target, read = inputs.target("--output", args.output), inputs.reading(args)
    with Bar() as bar:
        done = convert(inputs.inputs(args), target, read, inputs.leniency(args), bar)
        bar.end(done, [str(target)] + ([f"{target}.rejects.jsonl"] if done.rejected else []))
    return 0
