"""`launcher demo`: everything from nothing, once through."""

from __future__ import annotations

import argparse

HELP = "build the CPU image from Megatron's source and train a tiny GPT in it"


def arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def main(args: argparse.Namespace) -> int:
    """Run the demo; exit code 1 where the training didn't show what it should."""
    from launcher import demo
    from launcher.settings import settings

    demo.run(settings())
    return 0
