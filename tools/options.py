"""Writes the options of our program into docs/training-program.md, made of its parser.

`python3 -m tools.options` does it; a test holds the page to the parser.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launcher.trainer.gpt.arguments import parser

PAGE = Path(__file__).parents[1] / "docs/training-program.md"
BEGIN, END = "<!-- options: python3 -m tools.options -->\n", "<!-- options end -->\n"


def table() -> str:
    """Each group of the parser with its options: defaults, choices and help."""
    lines = ["| group | options (default) |", "|---|---|"]
    for group in parser()._action_groups:
        options = [_told(one) for one in group._group_actions if one.dest != "help"]
        if options:
            lines.append(f"| {group.title} | {'; '.join(options)} |")
    return "".join(f"{line}\n" for line in lines)


def _told(option: argparse.Action) -> str:
    """`--lr-decay-style` constant, linear or cosine (linear): what its help says."""
    told = f"`{option.option_strings[0]}`"
    if option.choices:
        told += f" {', '.join(map(str, option.choices))}"
    if option.required:
        told += " (required)"
    elif option.default is not None and option.default is not False and option.default != []:
        default = option.default
        given = default if isinstance(default, list) else [default]
        told += f" ({' '.join(f'{one:g}' if type(one) is float else str(one) for one in given)})"
    return f"{told}: {option.help}" if option.help else told


def page(text: str) -> str:
    """The page with the options as they are now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
