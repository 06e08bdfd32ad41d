"""`launcher schema`: the JSON Schema of a run file, for editors."""

from __future__ import annotations

import argparse

HELP = "print the JSON Schema of a run file, for editors"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Say what it is for; there are no arguments."""
    parser.epilog = (
        "launcher schema > run.schema.json, and in a run file's first line: "
        "# yaml-language-server: $schema=run.schema.json"
    )


def main(args: argparse.Namespace) -> int:
    """Print the schema."""
    import json

    from launcher.plan.schema import schema

    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
