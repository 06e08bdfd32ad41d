"""Commands about run files: `import` makes one, `schema` says what may be in it."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.base.errors import UsageError
from launcher.cli.command import argument, command

if TYPE_CHECKING:
    from launcher.tools.importing.shell_script import Images, ImportResult


TAG = argument("--tag", "image for a script whose own isn't in the matrix (24.10)", default="24.10")


@command(
    argument("script", "a script or a manifest", "SCRIPT", type=Path),
    argument("values", "a variable of the script: DATA_PATH=/data/x", "NAME=VALUE", nargs="*"),
    argument("-o --output", "write to this file, not to stdout", "FILE", type=Path),
    TAG,
    argument("--start", "number of the program to use, if several start (first: 1)", "N", type=int),
    argument("--nodes", "number of nodes that the script sees", "N", type=int),
    argument("--gpus", "number of GPUs per node that the script sees", "N", type=int),
    argument("--trust", "use no sandbox: the script can change files", action="store_true"),
    usage="%(prog)s SCRIPT [NAME=VALUE ...] [options] [-- ARGS ...]",
    epilog="Arguments after -- are the script's own: $1, $2 and so on.",
)
def import_(args: Namespace) -> int:
    """Write a run file from a shell script that starts Megatron.

    The script is run in a sandbox, with stand-ins for all that starts, copies or removes. What
    isn't in the run file goes to stderr, each with its line.
    """
    done = _imported(
        args.script,
        args.tag,
        trust=args.trust,
        given=_given(args.values),
        arguments=tuple(args.rest),
        nodes=args.nodes,
        gpus=args.gpus,
        number=args.start,
    )
    _write(args.output, done.text)
    if done.wrong:
        print(f"Before it runs:\n{done.wrong}", file=sys.stderr)
    return 0


def _imported(script: Path, tag: str, *, trust: bool = False, **options: Any) -> ImportResult:
    """Import a script, with the options of import_script; what isn't followed is printed."""
    from launcher.base.yamlfile import read
    from launcher.tools.importing.from_script import import_script
    from launcher.tools.importing.sandbox import find_sandbox

    name = str(script)
    done = import_script(
        script,
        read(script, name),
        images(tag),
        find_sandbox(trust=trust),
        **options,
    )
    for left in done.told:
        print(f"{name}:{left.line}: {left.what}", file=sys.stderr)
    return done


def _write(output: Path | None, text: str) -> None:
    """Print a run file, or write it where nothing is yet. Raises UsageError."""
    from launcher.base import files

    if output is None:
        print(text, end="")
        return
    try:
        files.write_new(output, text)
    except FileExistsError:
        raise UsageError(f"{output} is there already", "Give another -o.") from None


@command(
    argument("preset", "a preset such as gpt2.yaml, or a run file", "PRESET", nargs="?"),
    argument("--from-hf", "take the model's sizes from its config.json", "FOLDER", type=Path),
    argument("--from-script", "take a script's settings, as `import` does", "FILE", type=Path),
    argument("--gpus", "number of GPUs, or 0 for the CPU (default: the GPUs here)", "N"),
    argument("-o --output", "write to this file, not to stdout", "FILE", type=Path),
    TAG,
    usage="%(prog)s [PRESET | --from-hf FOLDER | --from-script FILE] [--gpus N] > mine.yaml",
)
def init(args: Namespace) -> int:
    """Write a run file to begin with, fitted to your GPUs.

    Without a name it is gpt2.yaml, or gpt2-tiny.yaml where no GPU is here.
    """
    from launcher.runs.checks import gather
    from launcher.tools.tuning import draft

    if len(given := [one for one in (args.preset, args.from_hf, args.from_script) if one]) > 1:
        raise UsageError(f"{given[0]} and {given[1]}: begin with one of them")
    here = gather.nvidia_gpus() or ()
    if args.gpus is not None and not args.gpus.isdecimal():
        raise UsageError(f"--gpus {args.gpus}: a number is wanted, 0 for the CPU")
    count = len(here) if args.gpus is None else int(args.gpus)
    if args.from_hf:
        begun = draft.of_model(args.from_hf)
    elif args.from_script:
        text = _imported(args.from_script, args.tag, arguments=tuple(args.rest)).text
        begun = draft.of_text(text, str(args.from_script))
    else:
        begun = draft.of_preset(args.preset or ("gpt2" if count else "gpt2-tiny"))
    if not (args.from_script and args.gpus is None):  # a script says how many
        begun = draft.fitted(begun, count, here[:count])
    for line in begun.lines:
        print(f"launcher: {line.strip()}", file=sys.stderr)
    _write(args.output, begun.written(str(args.output or "mine.yaml")))
    return 0


def _given(pairs: list[str]) -> dict[str, str]:
    """The variables by name. Raises UsageError for what is no NAME=VALUE."""
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise UsageError(f"{pair}: no NAME=VALUE", "The script's arguments must follow --.")
        found[name] = value
    return found


def images(tag: str) -> Images:
    """The matrix's images to choose from, of which `tag` is taken where a script names none."""
    from launcher.images.matrix.matrix_file import find_row, load_matrix
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

    from launcher.tools.json_schema import schema

    print(json.dumps(schema(), indent=2, ensure_ascii=False))
    return 0
