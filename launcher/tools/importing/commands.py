"""Commands that stand-ins wrote down, and the trace of the bash that ran them."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

OWN_PATH = re.compile(r"[^:]*/(standin|launcher-import-\w+)/bin:")
STARTER = re.compile(r"(?:exec )?'?(\S*/(?:torchrun|deepspeed|accelerate|python[\d.]*))(?: |$)")
MOST_WORDS = 5000
MOST_TRACED = 100_000
PartPlace = tuple[int, int]
"""The number of a command, and that of one of its parts."""


@dataclass(frozen=True)
class Word:
    """One argument of a command; `unknown` says what it depends on, "" where it is known."""

    text: str
    line: int
    unknown: str = ""


@dataclass(frozen=True)
class Omission:
    """Something of the script that isn't in the run file, and why."""

    line: int
    what: str


@dataclass
class Report:
    """What is reported of a script, in the order in which it is found."""

    told: list[Omission] = field(default_factory=list)

    def tell(self, line: int, what: str) -> None:
        self.told.append(Omission(line, what))


@dataclass(frozen=True)
class ScriptCommand:
    """A command that a stand-in wrote down; `parent` is the number of the one it stands in."""

    words: tuple[Word, ...]
    env: Mapping[str, Word]
    cwd: str
    line: int
    parent: int

    @property
    def name(self) -> str:
        """The program's name, without its folder."""
        return self.words[0].text.rpartition("/")[2]

    @property
    def parts(self) -> tuple[Word, ...]:
        """Its words, and each variable as NAME=value."""
        env = (replace(word, text=f"{name}={word.text}") for name, word in sorted(self.env.items()))
        return (*self.words, *env)


def traced_places(trace: list[tuple[int, str]]) -> list[tuple[int, str, int]]:
    """Where each traced command stands, and the how manieth there it is."""
    counts, found = Counter[tuple[int, str]](), []
    for line, text in trace:
        place = (line, text.split("=", 1)[0].split(" ", 1)[0])
        counts[place] += 1
        found.append((*place, counts[place]))
    return found


def differing_parts(
    commands: Sequence[ScriptCommand], others: Sequence[ScriptCommand], *, lost: bool = True
) -> set[PartPlace]:
    """The parts that differ in the likest command of another run that stands on the same line.

    All parts of a command that isn't there differ, where `lost`.
    """
    left, found = list(others), set[PartPlace]()
    for number, command in enumerate(commands):
        fit = [one for one in left if (one.line, one.name) == (command.line, command.name)]
        twin = min(
            fit, key=lambda one: len(differing_words(command.words, one.words)), default=None
        )
        if twin:
            left.remove(twin)
        if twin or lost:
            places = differing_words(command.parts, twin.parts if twin else ())
            found |= {(number, at) for at in places}
    return found


def differing_words(words: Sequence[Word], others: Sequence[Word]) -> set[int]:
    """The places of the words that the others don't have alike."""
    one, two = [word.text for word in words], [word.text for word in others]
    if len(one) == len(two):
        return {at for at in range(len(one)) if one[at] != two[at]}
    if len(one) + len(two) > MOST_WORDS:
        return set(range(len(one)))
    blocks = difflib.SequenceMatcher(None, one, two, False).get_matching_blocks()
    alike = {block.a + i for block in blocks for i in range(block.size)}
    return set(range(len(one))) - alike


def read_trace(text: str) -> list[tuple[int, str]]:
    """The traced commands, each with its line."""
    found = list[tuple[int, str]]()
    for row in text.split("\n")[:MOST_TRACED]:
        match = re.match(r"\++(\d+)\+(.*)", row)
        if match:
            found.append((int(match[1]), re.sub(r"^'\['", "[", match[2])))
        elif found and len(found[-1][1]) < 2000:
            found[-1] = (found[-1][0], f"{found[-1][1]}\n{row}")
    return found


def read_command(data: bytes, sent: Mapping[str, str], ours: Sequence[str]) -> ScriptCommand | None:
    """A record of a stand-in, None where it is torn; `ours` are exported only by the recorder."""
    parts = data.decode(errors="replace").split("\0")
    try:
        parent, line, count = int(parts[0]), int(parts[1]), int(parts[3])
    except (ValueError, IndexError):
        return None
    words = tuple(Word(text, line) for text in parts[4 : 4 + count])
    env = dict(part.partition("=")[::2] for part in parts[4 + count :] if "=" in part)
    hidden = re.compile(r"STANDIN_|(SHLVL|PWD|OLDPWD|_|BASH_ENV|HOME)$")
    exported = {
        name: Word(value, line)
        for name, value in env.items()
        if not hidden.match(name)
        and name not in ours
        and sent.get(name) != value
        and not (name == "PATH" and OWN_PATH.match(value))
    }
    return ScriptCommand(words, exported, parts[2], line, parent) if len(words) == count else None


@dataclass
class ScriptRun:
    """What one run gave."""

    commands: list[ScriptCommand]
    trace: list[tuple[int, str]]
    stderr: str
    stopped: str

    @property
    def starts_program(self) -> bool:
        names = ("torchrun", "deepspeed", "accelerate")
        return any(
            one.name in names or any(word.text.endswith(".py") for word in one.words)
            for one in self.commands
        )

    def missing_paths(self) -> tuple[set[str], set[str]]:
        """Paths that bash didn't find: those of programs, and those of files that it writes.

        What starts ranks is one wherever bash says so, as in `| tee log`.
        """
        starters = map(STARTER.match, (text for _, text in self.trace))
        programs, written = {match[1] for match in starters if match}, set()
        missing = r"(?m)(?:line \d+|^[/\w]*sh): (\S+): No such file or directory$"
        for path in re.findall(missing, self.stderr):
            called = re.compile(rf"(exec )?([/\w]*sh (-\w+ )*)?'?{re.escape(path)}'?( |$)")
            if not any(called.match(text) for _, text in self.trace):
                written.add(path)
            elif "/" in path:
                programs.add(path)
        return programs, {path for path in written if "/" in path}
