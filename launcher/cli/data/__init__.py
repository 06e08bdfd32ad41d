"""`launcher data`: text to Megatron's data files, an action a module of this package."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys

from launcher.cli import actions

HELP = "make Megatron's .bin and .idx from text, and look into them"

ACTIONS = ("tokenize", "convert", "inspect", "merge", "vocab")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions.declare(parser, __name__, ACTIONS)


def main(args: argparse.Namespace) -> int:
    """Call the action, after what it needs is installed.

    Raises ModuleNotFoundError, upon which the command line goes on in .venv, and UsageError where
    the packages can't be installed.
    """
    from launcher.data.install import install

    install()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: there is no algebra to do here
    gc.set_threshold(50_000)  # the start makes much that stays: not worth a look
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts and names have all kinds of characters
        sys.stdout.reconfigure(errors="backslashreplace")
    return actions.call(__name__, args)
