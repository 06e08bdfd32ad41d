"""Defines a command: a function, whose docstring is its help, with its arguments.

Only argparse is imported here and at the top of the modules of commands, so that `--help` is quick;
a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base import names
from launcher.base.screen import printable

if TYPE_CHECKING:
    from launcher.runs.follow.live import OutputDetail

Argument = Callable[[Any], object]
"""Adds an argument, or several, to a parser or to a group of its arguments."""


class Command:
    """A function from arguments to an exit code, and what the command line has to know of it.

    Its name is the function's and its help the docstring's first line. `settings` are those of
    its parser: usage, epilog, formatter_class.
    """

    def __init__(
        self, run: Callable[[Namespace], int], parts: Sequence[Argument], settings: dict[str, Any]
    ) -> None:
        self.run, self.parts, self.settings = run, parts, settings
        self.name = run.__name__.rstrip("_")
        first = (run.__doc__ or "").partition("\n")[0].rstrip(".")
        self.help = first[:1].lower() + first[1:]

    def __call__(self, args: Namespace) -> int:
        return self.run(args)

    def add_to(self, commands: Any) -> argparse.ArgumentParser:
        """Make it one of the commands, with its arguments."""
        parser = commands.add_parser(self.name, help=self.help, description=self.help)
        assert isinstance(parser, argparse.ArgumentParser)
        return self.declare(parser)

    def declare(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add its arguments to a parser."""
        for name, value in self.settings.items():
            setattr(parser, name, value)
        for part in self.parts:
            part(parser)
        return parser


def command(*parts: Argument, **settings: Any) -> Callable[[Callable[[Namespace], int]], Command]:
    """Make a function a command with these arguments."""
    return lambda run: Command(run, parts, settings)


def argument(flags: str, about: str, metavar: str | None = None, **options: Any) -> Argument:
    """An argument, or an option by its names: "--output -o". `options` are argparse's."""
    options |= {"help": about} if metavar is None else {"help": about, "metavar": metavar}
    return lambda parser: parser.add_argument(*flags.split(), **options)


def flag(flags: str, about: str) -> Argument:
    """An option that is given or not."""
    return argument(flags, about, action="store_true")


def either(*parts: Argument) -> Argument:
    """Arguments of which one may be given."""

    def add(parser: argparse.ArgumentParser) -> None:
        group = parser.add_mutually_exclusive_group()
        for part in parts:
            part(group)

    return add


def actions(*commands: Command, required: bool = True) -> Argument:
    """Commands below this one; `args.action` is the one that was chosen, or None."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.set_defaults(action=None)
        below = parser.add_subparsers(metavar="ACTION", required=required)
        for each in commands:
            each.add_to(below).set_defaults(action=each)

    return add


def call_action(args: Namespace) -> int:
    """Call the command below this one that was chosen."""
    chosen: Command = args.action
    return chosen(args)


def image(metavar: str, about: str, flags: str = "image", **options: Any) -> Argument:
    """An image's name, which goes on to docker as a word."""
    check = names.argument(options.pop("check", names.image))
    return argument(flags, about, metavar, type=check, **options)


def checkout(text: str) -> Path:
    """The folder of a Megatron-LM checkout, whole."""
    from launcher.base.settings import expanded

    return expanded(text).resolve()


def count(text: str, least: int = 0) -> int:
    """A whole number."""
    if not text.isdecimal() or (number := int(text)) < least:
        raise argparse.ArgumentTypeError(f"{text!r} isn't a whole number from {least} on")
    return number


def above_zero(text: str) -> float:
    """A number above zero, and no infinite one."""
    with suppress(ValueError):
        if 0 < (number := float(text)) < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"{text!r} isn't a number above 0")


SHOWN = either(
    flag("--quiet -q", "don't show the run's output; the record keeps it"),
    flag("--verbose -v", "don't shorten the run's lines on a terminal"),
)
RUN_HELP = "a run's id, the first characters of the id, a name, or a pattern: 'gpt2-*'"
RUN = argument("run", RUN_HELP, "RUN")
RUNS = argument("runs", RUN_HELP, "RUN", nargs="+")
JSON = flag("--json", "print one JSON object a line")
QUIET = flag("--quiet -q", "print only the ids")
GPUS = argument("--gpus", "GPUs to use: a number, all, 0 (use the CPU) or device=0,1", "WHICH")
TAGS = argument("tags", "tags, such as 24.10 (`matrix list` lists all)", "TAG", nargs="*")
ALL = flag("--all", "all tags with CUDA for which a run was reported")
MEGATRON = argument("--megatron", "a Megatron release in place of the row's: 0.10.0", "RELEASE")
RELEASES = argument("--megatron", "releases to use, or all", "RELEASE", action="append", default=[])
SOURCE = argument("--source", "a Megatron-LM checkout to build from", "PATH", type=checkout)
EXTRAS = argument(
    "--extras", 'packages to add, or sets that the matrix names: "hf wandb peft<1"', "NAMES"
)
BUILDER = image("IMAGE", "an image with compilers, in place of the row's own", "--builder")
BASES = image(
    "IMAGE",
    "a base image in place of the row's; {tag} in IMAGE stands for the tag",
    "--base",
    check=names.image_for_tag,
)


def shown(args: Namespace) -> OutputDetail:
    """How much of a run is shown."""
    from launcher.runs.follow.live import OutputDetail

    return OutputDetail["QUIET" if args.quiet else "WHOLE" if args.verbose else "USUAL"]


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """The rows in columns that are as wide as their widest cell; a cell is one line."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows)]  # noqa: B905 - all are as long
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)
