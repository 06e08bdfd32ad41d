"""Commands about run files: `import` makes one, `schema` says what may be in it."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.base.errors import UsageError
from launcher.cli.command import argument, command

if TYPE_CHECKING:
    from launcher.tools.importing.shell_script import Images


@command(
    argument("script", "pretrain_gpt.sh, or a manifest", "SCRIPT", type=Path),
    argument("values", "for what it reads: DATA_PATH=/data/x", "NAME=VALUE", nargs="*"),
    argument("-o --output", "write there, not to stdout", "FILE", type=Path),
    argument("--tag", "the image where the script names none (default: 24.10)", default="24.10"),
    argument("--start", "which of several starts, from 1", "N", type=int),
    argument("--nodes", "the nodes that it is answered where it asks", "N", type=int),
    argument("--gpus", "the GPUs of each node, likewise", "N", type=int),
    argument("--trust", "no sandbox: the stand-ins alone", action="store_true"),
    usage="%(prog)s SCRIPT [NAME=VALUE ...] [options] [-- ARGS ...]",
    epilog="What stands after -- is taken for the script's own arguments, $1 and on.",
)
def import_(args: Namespace) -> int:
    """Turn a shell script that starts Megatron into a run file.

    The script is run in a sandbox, with stand-ins for all that starts, copies or removes. What
    isn't in the run file goes to stderr, each with its line.
    """
    from launcher.base import files
    from launcher.base.yamlfile import read
    from launcher.tools.importing.from_script import import_script
    from launcher.tools.importing.sandbox import find_sandbox

    name = str(args.script)
    done = import_script(
        args.script,
        read(args.script, name),
        images(args.tag),
        find_sandbox(trust=args.trust),
        given=_given(args.values),
        arguments=tuple(args.rest),
        nodes=args.nodes,
        gpus=args.gpus,
        number=args.start,
    )
    if args.output is None:
        print(done.text, end="")
    else:
        try:
            files.write_new(args.output, done.text)
        except FileExistsError:
            raise UsageError(f"{args.output} is there already", "Give another -o.") from None
    for left in done.told:
        print(f"{name}:{left.line}: {left.what}", file=sys.stderr)
    if done.wrong:
        print(f"Before it runs:\n{done.wrong}", file=sys.stderr)
    return 0


def _given(pairs: list[str]) -> dict[str, str]:
    """The variables by name. Raises UsageError for what is no NAME=VALUE."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"{pair}: no NAME=VALUE", "The script's arguments stand behind --.")
        found[name] = value
    return found


def images(tag: str) -> Images:
    """The matrix's images to choose from, of which `tag` is taken where a script names none."""
    from launcher.images.matrix.load import find_row, load_matrix
    from launcher.images.matrix.schema import misfit
    from launcher.tools.importing.shell_script import Images

    matrix, releases = load_matrix(), {}
    find_row(matrix, tag)
    for name, row in matrix.rows.items():
        fit = [v for v, release in matrix.releases.items() if misfit(row, v, release) is None]
        releases[name] = tuple(dict.fromkeys([row.megatron, *fit]))
    return Images(releases, tag, {name for name, row in matrix.rows.items() if row.source != "git"})


@command(
    epilog="launcher schema > run.schema.json, and in a run file's first line: "
    "# yaml-language-server: $schema=run.schema.json"
)
def schema(args: Namespace) -> int:
    """Print the JSON Schema of a run file, for editors."""
    import json

    from launcher.runs.plan.schema import schema

    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
