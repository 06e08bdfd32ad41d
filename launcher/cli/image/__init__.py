"""`launcher image`: what is done with images, an action a module of this package."""

from __future__ import annotations

import argparse

from launcher.cli import actions

HELP = "build images of the matrix, check them, carry them elsewhere"

ACTIONS = (
    *("build", "ls", "verify", "inspect", "probe", "scan"),
    *("save", "load", "push", "pull", "prune"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subcommands."""
    actions.declare(parser, __name__, ACTIONS)


def main(args: argparse.Namespace) -> int:
    """Call the action."""
    return actions.call(__name__, args)
