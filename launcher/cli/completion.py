"""`launcher completion`: shell completion, made by shtab from the parser."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Iterable, Iterator

from launcher.cli.command import argument, command

NAME = "launcher"
RESUMABLE = "resumable"
RUNS = f"{NAME} ps --quiet 2>/dev/null"
RECORDED = f"{NAME} runs --quiet 2>/dev/null"
RUNS_OF = {
    "resume": f"{NAME} completion {RESUMABLE} 2>/dev/null",
    "rerun": RECORDED,
    "runs": RECORDED,
    "plot": RECORDED,
}
"""Which runs a command takes, where those aren't the ones that go on."""
CONFIG = "_launcher_config_files"
CONFIGS = {
    "bash": '_launcher_config_files() {{ compgen -W "{presets}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_launcher_config_files() "
    "{{ _alternative 'presets:preset:({presets})' 'files:file:_files' }}",
    "fish": "function _launcher_config_files\n"
    "    string join \\n {presets}\n    __fish_complete_path (commandline -ct)\nend",
}


@command(
    argument("what", "", choices=[*sorted(CONFIGS), RESUMABLE]),
    epilog=f"bash: source <({NAME} completion bash), for an alias or a program {NAME}; "
    f'zsh, after compinit: eval "$({NAME} completion zsh)"; '
    f"fish: {NAME} completion fish | source. "
    f"{RESUMABLE} prints the runs that can be resumed; the script uses it.",
)
def completion(args: Namespace) -> int:
    """Print the completion script of bash, zsh or fish."""
    from launcher.runs.follow import find

    if args.what == RESUMABLE:
        print("".join(f"{run}\n" for run in find.resumable()), end="")
    else:
        print(script(args.what))
    return 0


def script(shell: str) -> str:
    """The completion script of a shell: commands, options, and values that are known."""
    import shtab

    from launcher import cli
    from launcher.images.matrix.matrix_file import load_matrix
    from launcher.runs.backends import names
    from launcher.runs.runfile.origins import PRESETS

    parser, matrix = cli.parser(), load_matrix()
    parser.prog = NAME
    choices: dict[str, Iterable[str]] = {"megatron": matrix.releases, "backend": names()}
    choices |= dict.fromkeys(("tag", "tags"), matrix.rows)
    completes: dict[str, object] = {"script": shtab.FILE, "source": shtab.DIRECTORY}
    presets_and_files = dict.fromkeys(CONFIGS, CONFIG) | {"fish": f"({CONFIG})"}
    completes |= {"config": presets_and_files, "preset": presets_and_files}
    for name, action in _actions(parser):
        if action.dest in choices:
            action.choices = [*choices[action.dest]]
        elif action.metavar in ("FILE", "FOLDER", "DIR"):
            is_file = action.metavar == "FILE"
            action.complete = shtab.FILE if is_file else shtab.DIRECTORY  # type: ignore[attr-defined]
        elif action.dest in completes:
            action.complete = completes[action.dest]  # type: ignore[attr-defined]
        elif action.dest in ("run", "runs"):
            action.complete = shtab.cmd(RUNS_OF.get(name, RUNS))  # type: ignore[attr-defined]
    presets = " ".join(sorted(path.name for path in PRESETS.glob("*.yaml")))
    return shtab.complete(parser, shell, preamble=CONFIGS[shell].format(presets=presets))


def _actions(
    parser: argparse.ArgumentParser, command: str = ""
) -> Iterator[tuple[str, argparse.Action]]:
    """The arguments of the parser and of the commands below it, each with its command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from _actions(below, command or name)
        else:
            yield command, action
