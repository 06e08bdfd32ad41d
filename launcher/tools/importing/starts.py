"""Finds the commands of a recording that start a program, and takes them apart."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from launcher.runs.plan import program_options
from launcher.runs.plan.program import upstreams
from launcher.tools.importing.commands import ScriptCommand, Word
from launcher.tools.importing.starters import options, tables

MODULES = re.compile(r"torch\.distributed\.(?:launch|run|elastic)|(deepspeed)")
"""Modules that start ranks: torchrun's and deepspeed's."""


@dataclass(frozen=True)
class Start:
    """A command that starts a program, and all that it stands in, the outermost first.

    `options` are those of `starter`: torchrun, deepspeed or accelerate; "" where Python starts it.
    """

    line: int
    starter: str
    options: tuple[tuple[str, Word], ...]
    program: Word
    arguments: tuple[Word, ...]
    command: ScriptCommand
    around: tuple[ScriptCommand, ...]

    @property
    def name(self) -> str:
        """The program's, without its folder."""
        return self.program.text.rpartition("/")[2]


def find_starts(commands: Sequence[ScriptCommand]) -> list[Start]:
    """All starts, in the commands' order."""
    found = map(_start_of, commands)
    return [replace(one, around=tuple(_around(commands, one.command))) for one in found if one]


def distinct(starts: Sequence[Start]) -> list[Start]:
    """The starts in order; those that differ in a node's own number alone are one."""
    found = dict[tuple[str, ...], Start]()
    for start in starts:
        key = (start.starter, start.program.text, *(word.text for word in start.arguments))
        first = found.setdefault(key, start)
        if _order(start) < _order(first):  # those in the background come in any order
            found[key] = start
    return list(found.values())


def _order(start: Start) -> tuple[int, list[str]]:
    return start.line, [word.text for one in start.around for word in one.words]


def choose(starts: Sequence[Start]) -> int:
    """The place of the start that trains: a pretrain_*.py, else the one with most options."""

    def rank(at: int) -> tuple[bool, bool, int]:
        start = starts[at]
        trains = start.name.startswith("pretrain_") or any(
            word.text.partition("=")[0] in ("--num-layers", "--hidden-size")
            for word in start.arguments
        )
        return trains, bool(start.starter or start.around), 0 if trains else len(start.arguments)

    return max(range(len(starts)), key=lambda at: (*rank(at), -at))


def differences(start: Start, other: Start) -> str:
    """What the other start has in another way, for people."""
    if other.name != start.name:
        return f"it starts {other.name or other.program.text}"
    ours, theirs = (dict(as_options(one.arguments)) for one in (start, other))
    changed = [
        " ".join([name, *[word.text for word in values]])
        for name, values in theirs.items()
        if name not in ours or [w.text for w in ours[name]] != [w.text for w in values]
    ]
    changed += [f"no {name}" for name in ours if name not in theirs]
    more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
    return ", ".join(changed[:4]) + more


def as_options(words: Sequence[Word]) -> Iterator[tuple[str, tuple[Word, ...]]]:
    """Each option with its values; words before the first are of the option ""."""
    name, values = "", list[Word]()
    for word in words:
        if not re.match(r"--\w", word.text):
            values.append(word)
            continue
        if name or values:
            yield name, tuple(values)
        name, equals, value = word.text.partition("=")
        values = [replace(word, text=value)] if equals else []
    if name or values:
        yield name, tuple(values)


def respelled(words: Sequence[Word]) -> dict[str, str]:
    """Options that a fork of upstream's program spells with _, as Megatron has them."""
    known = {*program_options.own_keys(), *program_options.table().megatron}
    names = {name: name.replace("_", "-") for name, _ in as_options(words)}
    return {name: ours for name, ours in names.items() if name not in known and ours in known}


def _start_of(command: ScriptCommand) -> Start | None:
    """The command taken apart, if it starts a Python program."""
    if command.name.endswith(".py"):
        return _taken_apart(command, "python", command.words)
    starter = re.sub(r"^python[\d.]*$", "python", command.name)
    if "takes" not in tables().get(starter, ()):
        return None
    verb = len(command.words) > 1 and command.words[1].text in tables()[starter]["verbs"]
    return _taken_apart(command, starter, command.words[1 + verb :])


def _taken_apart(command: ScriptCommand, starter: str, words: Sequence[Word]) -> Start | None:
    """The starter's own options end at the program, or at the module."""
    given, behind = options(starter, words)
    if not behind:
        return None
    program, own = behind[0], starter != "python"
    if given and given[-1][0] in ("m", "module"):
        if not own and (ranks := MODULES.match(program.text)):
            return _taken_apart(command, ranks[1] or "torchrun", behind[1:])
        path = f"{program.text.replace('.', '/')}.py"
        if path not in upstreams() and not own:
            return None
        program = replace(program, text=path if path in upstreams() else f"-m {program.text}")
    elif not program.text.endswith(".py") and not (program.unknown and own):
        return None
    given = [pair for pair in given if own and pair[0] not in ("m", "module")]
    name = starter if own else ""
    return Start(command.line, name, tuple(given), program, tuple(behind[1:]), command, ())


def _around(commands: Sequence[ScriptCommand], command: ScriptCommand) -> list[ScriptCommand]:
    """The commands that the command stands in, the outermost first."""
    found = list[ScriptCommand]()
    while 0 <= command.parent < len(commands) and len(found) < 50:
        command = commands[command.parent]
        found.insert(0, command)
    return found


def upstreams_path(text: str) -> str:
    """The program of upstream's that a path ends in, "" for none."""
    paths = sorted(upstreams(), key=len, reverse=True)
    return next((path for path in paths if f"/{text}".endswith(f"/{path}")), "")


def named_in_part(text: str) -> str:
    """Of a path that isn't known wholly, the one program of upstream's that ends as it does."""
    name = text.rpartition("/")[2]
    found = [path for path in upstreams() if f"/{path}".endswith(f"/{name}")]
    return found[0] if len(found) == 1 else ""
