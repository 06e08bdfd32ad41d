"""`launcher image probe`: what is in an image, as it says itself."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import names
from launcher.cli.compat import above_zero

if TYPE_CHECKING:
    from collections.abc import Mapping

    from launcher.trials.facts import Fact
    from launcher.trials.trials import Verdict

HELP = "ask an image what is in it, and what works there"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action's arguments."""
    add = parser.add_argument
    add(
        "tag",
        metavar="TAG",
        nargs="?",
        type=names.argument(names.image),
        help="a row of the matrix, or any image by its name",
    )
    add("--gpus", default="0", metavar="WHICH", help="GPUs to try layers on: N, all, device=0,1")
    add("--base", action="store_true", help="the row's base in place of the image made from it")
    add("--facts", action="store_true", help="only the facts, no training")
    add("--source", metavar="PATH", type=Path, help="a Megatron-LM checkout to train with")
    add("--backend", default="docker", choices=["docker", "local"], help="local: this environment")
    limit = "seconds for a training run (600)"
    add("--limit", type=above_zero, default=600.0, metavar="S", help=limit)
    add("--json", action="store_true", help="the same as JSON")
    add("--write", action="store_true", help="write facts that the row lacks into matrix.yaml")


def main(args: argparse.Namespace) -> int:
    """Print the facts; 1 where one failed, or isn't what the row says."""
    from launcher.backends import backend
    from launcher.errors import UsageError
    from launcher.matrix.load import find_row, load_matrix
    from launcher.plan.gpus import parse_gpus
    from launcher.settings import expanded, settings
    from launcher.trials import facts, trials, write

    if (args.backend == "local") == bool(args.tag):
        raise UsageError(
            "this takes an image, or --backend local without one",
            "Name a row of the matrix (24.10) or an image.",
        )
    parse_gpus(args.gpus)
    matrix = load_matrix()
    row = matrix.rows.get(args.tag)
    if row is None and (args.base or args.write):
        find_row(matrix, args.tag or "")
    image = {"tag": args.tag} if row else {"name": args.tag or "local"}
    if row and args.base:
        image = {"name": row.base}
    chosen = backend(args.backend)
    found = facts.ask(chosen, image, args.gpus)
    source = args.source and expanded(args.source).resolve()
    verdicts: dict[str, Verdict] = {}
    if not (args.facts or args.base):
        verdicts = trials.attempts(chosen, image, args.gpus, args.limit, found, source)
    print(_json(found, verdicts) if args.json else _table(found, verdicts))
    wrong = facts.differences(row, found) if row else []
    for line in wrong:
        print(f"launcher: {line}", file=sys.stderr)
    if args.write and row:
        from launcher import files

        path = settings().matrix
        new = facts.unstated(row, found)
        files.write(path, write.into(path.read_text(encoding="utf-8"), args.tag, new))
        print(f"launcher: {path.name}: {_told(new)}", file=sys.stderr)
    failed = any(fact.error for fact in found.values())
    return 1 if wrong or failed or any(one.failed for one in verdicts.values()) else 0


def _table(found: Mapping[str, Fact], verdicts: Mapping[str, Verdict]) -> str:
    lines = []
    for name, fact in found.items():
        lines += [f"{name:26}{fact}", *(f"{'':26}{line}" for line in fact.warnings)]
    for name, verdict in verdicts.items():
        told = (*verdict.warnings, *verdict.tail)
        lines += [f"{name:26}{verdict}", *(f"{'':26}{line}" for line in told)]
    return "\n".join(lines)


def _json(found: Mapping[str, Fact], verdicts: Mapping[str, Verdict]) -> str:
    import json
    from dataclasses import asdict

    told = {
        "facts": {name: asdict(fact) for name, fact in found.items()},
        "trials": {name: asdict(verdict) for name, verdict in verdicts.items()},
    }
    return json.dumps(told, indent=2)


def _told(new: Mapping[str, str]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in new.items()) or "nothing to add"
