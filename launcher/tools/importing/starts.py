"""Finds the command of a shell script that starts training."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from launcher.runs.plan.program import upstreams
from launcher.tools.importing.shell import Branch, Script, ShellCommand, Unfollowed
from launcher.tools.importing.words import Word

LAUNCHERS = ("torch.distributed.launch", "torch.distributed.run")
OF_TORCHRUN = frozenset(
    "nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id "
    "rdzv_conf max_restarts monitor_interval start_method role log_dir redirects tee "
    "local_ranks_filter node_ip local_addr".split()
)
"""torchrun's options that take a value: https://docs.pytorch.org/docs/stable/elastic/run.html"""


@dataclass(frozen=True)
class Start:
    """The command that starts training: torchrun's options, the program, its arguments.

    `torchrun` is None where Python starts the program itself.
    """

    line: int
    torchrun: tuple[Word, ...] | None
    program: Word
    arguments: tuple[Word, ...]
    env: dict[str, Word]
    before: tuple[Word, ...]
    output: str

    @property
    def name(self) -> str:
        """The program's, without its folder."""
        return file_name(self.program)


def file_name(word: Word) -> str:
    """The last part of a path."""
    return word.text.rpartition("/")[2]


def choose_start(script: Script) -> tuple[Start | None, Script, list[Start]]:
    """What starts training, the script with what leads to it followed, and the other starts."""
    found = list(_starts(script))
    if not found:
        return None, script, []
    best, branches = max(found, key=lambda one: _rank(*one))
    return best, _entered(script, branches, best), [one for one, _ in found if one is not best]


def _starts(
    script: Script, branches: tuple[Branch, ...] = ()
) -> Iterator[tuple[Start, tuple[Branch, ...]]]:
    """The commands that start a program, each with the branches that lead to it."""
    for command in script.commands:
        if start := start_of(command):
            yield start, branches
    for branch in script.branches:
        yield from _starts(branch.script, (*branches, branch))


def _rank(start: Start, branches: tuple[Branch, ...]) -> tuple[bool, bool, bool, int]:
    """The best is a pretrain_*.py, then what is started on several GPUs, then what is followed.

    Of several others, it is the one with most arguments.
    """
    trains = start.name.startswith("pretrain_")
    several = start.torchrun is not None or any(word.text == "srun" for word in start.before)
    return trains, several, not branches, 0 if trains else len(start.arguments)


def _entered(script: Script, branches: tuple[Branch, ...], start: Start) -> Script:
    """The script with these branches followed, which is told."""
    for branch in branches:
        what = (
            f"{branch.left.what.partition(':')[0]}: followed to line {start.line}, where it starts"
        )
        inner = branch.script
        script = Script(
            [*script.commands, *inner.commands],
            script.exported | inner.exported,
            [one for one in script.left if one != branch.left]
            + [Unfollowed(branch.left.line, f"{what} {start.name}"), *inner.left],
        )
    return script


def start_of(command: ShellCommand) -> Start | None:
    """The command taken apart, if it starts a Python program."""
    words = command.words
    for at, word in enumerate(words):
        called = file_name(word)
        if called == "torchrun":
            return _taken_apart(command, at, words[at + 1 :])
        if re.fullmatch(r"python[\d.]*", called):
            rest = words[at + 1 :]
            while rest and re.fullmatch(r"-[uOBsSEI]+", rest[0].text):
                rest = rest[1:]
            launched = len(rest) > 1 and rest[0].text == "-m" and rest[1].text in LAUNCHERS
            return _taken_apart(command, at, rest[2 * launched :], launched=launched)
        if word.unknown and words[at + 1 : at + 2] and named_in_part(words[at + 1]):
            return _taken_apart(command, at + 1, words[at + 1 :], launched=False)
        if re.fullmatch(r"pretrain_\w+\.py", called):
            return _taken_apart(command, at, words[at:], launched=False)
    return None


def _taken_apart(
    command: ShellCommand, at: int, words: tuple[Word, ...], *, launched: bool = True
) -> Start | None:
    """torchrun's own words end at the program, the first that is no option or its value."""
    position = 0
    while position < len(words) and words[position].text.startswith("-"):
        name = words[position].text.lstrip("-").replace("-", "_")
        position += 2 if name in OF_TORCHRUN else 1
    if position >= len(words):
        return None
    program = words[position]
    if words[:position] and words[position - 1].text in ("-m", "--module"):
        path = f"{program.text.replace('.', '/')}.py"
        program = replace(program, text=path if path in upstreams() else "")
    if not program.text.endswith(".py"):
        return None
    return Start(
        line=command.line,
        torchrun=words[:position] if launched else None,
        program=program,
        arguments=words[position + 1 :],
        env=command.env,
        before=command.words[:at],
        output=command.output,
    )


def hint(script: Script) -> str:
    """What to say of a script where no command starts a program."""
    for command in script.commands:
        words = (Word("-c", 0), *command.words)
        for before, word in pairwise(words):
            if word.unknown and re.fullmatch(r"-[a-z]*c", before.text):
                return f"Line {command.line} starts what isn't known: {word.unknown}."
    if script.left:
        return f"Line {script.left[0].line}: {script.left[0].what}."
    return "It takes torchrun, python -m torch.distributed.launch, or python, and the program."


def named_in_part(program: Word) -> str:
    """Of a path that isn't known wholly, the one program of upstream's that ends as it does."""
    if not program.unknown:
        return ""
    found = [path for path in upstreams() if f"/{path}".endswith(f"/{file_name(program)}")]
    return found[0] if len(found) == 1 else ""
