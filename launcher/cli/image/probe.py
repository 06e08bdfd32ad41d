"""`launcher image probe`: what is in an image, as it says itself."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.probe.facts import Fact

HELP = "ask an image what is in it, and what works there"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add("tag", metavar="TAG", help="a row of the matrix, or any image by its name")
    add("--gpus", default="0", metavar="WHICH", help="GPUs to try layers on: N, all, device=0,1")
    add("--base", action="store_true", help="the row's base in place of the image made from it")
    add("--json", action="store_true", help="the same as JSON")
    add("--write", action="store_true", help="write facts that the row lacks into matrix.yaml")


def main(args: argparse.Namespace) -> int:
    """Print the facts; 1 where one failed, or isn't what the row says."""
    from launcher.backends import backend
    from launcher.matrix.load import find_row, load_matrix
    from launcher.probe import facts, write
    from launcher.settings import settings

    matrix = load_matrix()
    row = matrix.rows.get(args.tag)
    if row is None and (args.base or args.write):
        find_row(matrix, args.tag)
    image = {"name": row.base} if row and args.base else {"tag" if row else "name": args.tag}
    found = facts.ask(backend("docker"), image, args.gpus)
    print(_json(found) if args.json else _table(found))
    wrong = facts.differences(row, found) if row else []
    for line in wrong:
        print(f"launcher: {line}", file=sys.stderr)
    if args.write and row:
        path = settings().matrix
        new = facts.unstated(row, found)
        path.write_text(write.into(path.read_text(encoding="utf-8"), args.tag, new), "utf-8")
        print(f"launcher: {path.name}: {_told(new)}", file=sys.stderr)
    return 1 if wrong or any(fact.error for fact in found.values()) else 0


def _table(found: Mapping[str, Fact]) -> str:
    lines = []
    for name, fact in found.items():
        lines.append(f"{name:26}{fact}")
        lines += [f"{'':26}{warning}" for warning in fact.warnings]
    return "\n".join(lines)


def _json(found: Mapping[str, Fact]) -> str:
    import json
    from dataclasses import asdict

    return json.dumps({name: asdict(fact) for name, fact in found.items()}, indent=2)


def _told(new: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in new.items()) or "nothing to add"
