"""`launcher completion`: what a shell completes of the command line, by shtab, from its parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

HELP = "print the completion script of bash or zsh"
NAME = "launcher"
RUNS = f"{NAME} ps --quiet 2>/dev/null"
CONFIGS = {
    "bash": '_launcher_config_files() {{ compgen -W "{presets}" -- "$1"; compgen -f -- "$1"; }}',
    "zsh": "_launcher_config_files() "
    "{{ _alternative 'presets:preset:({presets})' 'files:file:_files' }}",
}
FILES = frozenset({"script", "output"})
FOLDERS = frozenset({"source"})


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.epilog = f"bash: source <({NAME} completion bash), for an alias or a program {NAME}."
    parser.add_argument("shell", choices=sorted(CONFIGS))


def main(args: argparse.Namespace) -> int:
    """Print the script."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """The completion script of "bash" or "zsh": commands, options, and values that are known."""
    import shtab

    from launcher import cli
    from launcher.run.source import PRESETS

    parser = cli._parser([*cli.COMMANDS])
    parser.prog = NAME
    for action in _actions(parser):
        _complete(action)
    presets = " ".join(sorted(path.name for path in PRESETS.glob("*.yaml")))
    return shtab.complete(parser, shell, preamble=CONFIGS[shell].format(presets=presets))


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The arguments of the parser and of the commands below it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _actions(below)
        else:
            yield action


def _complete(action: argparse.Action) -> None:
    """Say what an argument takes, where its name tells."""
    import shtab

    from launcher.backends import BACKENDS
    from launcher.matrix.load import load_matrix

    function = {shell: "_launcher_config_files" for shell in CONFIGS}
    if action.dest == "config":
        action.complete = function  # type: ignore[attr-defined]
    elif action.dest in ("run", "runs"):
        action.complete = shtab.cmd(RUNS)  # type: ignore[attr-defined]
    elif action.dest in FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif action.dest in FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif action.dest in ("tag", "tags"):
        action.choices = [*load_matrix().rows]
    elif action.dest == "megatron":
        action.choices = [*load_matrix().releases]
    elif action.dest == "backend":
        action.choices = [*BACKENDS]
