"""`launcher data`: text to Megatron's data files, an action a module of this package."""

from __future__ import annotations

import argparse
import gc
import io
import os
import sys
from importlib import import_module

HELP = "make Megatron's .bin and .idx from text, and look into them"

ACTIONS = ("tokenize", "convert", "inspect", "merge", "vocab")
"""Each a module here with HELP, arguments(parser) and main(args), imported when it is used."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        module = import_module(f"{__name__}.{name}")
        module.arguments(actions.add_parser(name, help=module.HELP, description=module.HELP))


def main(args: argparse.Namespace) -> int:
    """Call the action, after what it needs is installed.

    Raises ModuleNotFoundError, upon which the command line goes on in .venv, and UsageError where
    the packages can't be installed.
    """
    from launcher.data.install import install

    install()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's: there is no algebra to do here
    gc.set_threshold(50_000)  # what is loaded stays, and is looked through again and again
    if isinstance(sys.stdout, io.TextIOWrapper):  # texts and names have all kinds of characters
        sys.stdout.reconfigure(errors="backslashreplace")
    code: int = import_module(f"{__name__}.{args.action}").main(args)
    return code
