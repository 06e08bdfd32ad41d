"""`launcher image`: what is done with images, an action a module of this package."""

from __future__ import annotations

import argparse
from importlib import import_module

HELP = "build images of the matrix, check them, carry them elsewhere"

ACTIONS = (
    *("build", "ls", "verify", "inspect", "probe", "scan"),
    *("save", "load", "push", "pull", "prune"),
)
"""Each a module here with HELP, arguments(parser) and main(args), imported when it is used."""


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in ACTIONS:
        module = import_module(f"{__name__}.{name}")
        module.arguments(actions.add_parser(name, help=module.HELP, description=module.HELP))


def main(args: argparse.Namespace) -> int:
    """Call the action."""
    code: int = import_module(f"{__name__}.{args.action}").main(args)
    return code
