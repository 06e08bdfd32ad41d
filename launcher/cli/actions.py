"""Actions of a command, each a module of the command's package.

Such a module has HELP, arguments(parser) and main(args), and is imported when its command is used.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module


def declare(parser: argparse.ArgumentParser, package: str, names: Sequence[str]) -> None:
    """Add a subcommand for each module of the package that is named."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name in names:
        module = import_module(f"{package}.{name}")
        module.arguments(actions.add_parser(name, help=module.HELP, description=module.HELP))


def call(package: str, args: argparse.Namespace) -> int:
    """Run the chosen one, and give its exit code."""
    code: int = import_module(f"{package}.{args.action}").main(args)
    return code
