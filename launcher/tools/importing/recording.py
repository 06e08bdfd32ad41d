"""What a script starts, by letting bash run it with stand-ins: each command with its words."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from launcher.base.errors import UsageError
from launcher.tools.importing import placeholders
from launcher.tools.importing.commands import (
    Omission,
    PartPlace,
    Report,
    ScriptCommand,
    ScriptRun,
    Word,
    differing_parts,
    read_command,
    read_trace,
    traced_places,
)
from launcher.tools.importing.placeholders import LARGE, NUMBER, READ, SMALL, names_in, readable
from launcher.tools.importing.sandbox import SandboxOutput, ScriptCall

HOME = "/home/@home@"
ASSIGNED = re.compile(r"(?:export |local |declare \S+ )?(\w+)\+?=")
COUNTED = re.compile(r"\$\{(WORLD_SIZE|\w*NNODES|\w*NUM_NODES|\w*GPUS?\w*|\w*NPROC\w*):?-(\w+)\}")
"""Counts that are set from outside, with what a script takes where they aren't."""
MOST_RUNS = 12
MOST_NAMES = 16
MOST_RECORDS = 1000
MOST_WORDS = 300_000
"""Of all that a script starts, with each command's environment."""
PER_JOB = (
    "SLURM_JOB_ID SLURM_JOBID SLURM_JOB_NAME SLURM_JOB_USER SLURM_ARRAY_TASK_ID "
    "SLURM_JOB_PARTITION SLURM_JOB_ACCOUNT PBS_JOBID PBS_JOBNAME LSB_JOBID JOB_ID"
).split()
FOLDERS = ("SLURM_SUBMIT_DIR", "PBS_O_WORKDIR")
"""Where the job is submitted from, which is where the launcher is started."""
NODE_LISTS = ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
DATES = ("2001-01-02 03:04:05", "2031-12-30 23:58:59")
RANKS = (
    "SLURM_PROCID SLURM_NODEID SLURM_LOCALID OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK "
    "PMI_RANK PMIX_RANK"
).split()

OF_A_JOB = (*PER_JOB, *FOLDERS, *RANKS, *NODE_LISTS, "PBS_NODEFILE")


@dataclass(frozen=True)
class ScriptMachine:
    """What a script is answered where it asks for its machine; no GPUs where that isn't known."""

    nodes: int = 1
    gpus: int = 0
    batch: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """A script's commands in order, and what else is to be reported."""

    commands: tuple[ScriptCommand, ...]
    told: tuple[Omission, ...] = ()
    rows: tuple[str, ...] = ()


class Sandbox(Protocol):
    """Where a script is run."""

    def run(self, call: ScriptCall, env: Mapping[str, str]) -> SandboxOutput:
        """The outcome of the call."""


@dataclass(frozen=True)
class World:
    """One run of a script: what it is answered, and how far it goes.

    `changed` is the value that is another than in the first run; "" where all are, None where none.
    """

    numeric: frozenset[str] = frozenset()
    programs: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    beyond: bool = False
    changed: str | None = None
    second: str = SMALL

    def differs(self, name: str) -> bool:
        """Whether a value is another than in the first run."""
        return self.changed in ("", name)


class Recorder(Report):
    """Runs one script, as often as it needs to know what depends on what."""

    def __init__(
        self, call: ScriptCall, machine: ScriptMachine, given: Mapping[str, str], sandbox: Sandbox
    ) -> None:
        super().__init__()
        self.call, self.machine, self.given, self.sandbox = call, machine, dict(given), sandbox
        self.rows = call.text.splitlines()
        self.text, self.labels = placeholders.filled(call.text.replace("\r\n", "\n"))
        needed, tested = placeholders.unset_variables(f"{call.text}\n{call.called}")
        known = {*machine.variables, *given, *(OF_A_JOB if machine.batch else ())}
        self.names = [name for name in needed if name not in known]
        self.tested = [name for name in tested if name not in known]

    def record(self) -> Recording:
        """The recording. Raises UsageError where the script had to be stopped before a start."""
        world, run = self._first(World())
        if not run.starts_program and not run.stopped:
            further, beyond = self._first(replace(world, beyond=True))
            if beyond.starts_program:
                world, run = further, beyond
                self._tell_exits(run)
        if run.stopped and not run.commands:
            raise UsageError(f"{self.call.path}: {run.stopped}, and nothing was started before")
        if run.stopped:
            self.tell(run.commands[-1].line, f"{run.stopped}: stopped there")
        other = self._run(replace(world, changed=""))
        if len(other.commands) != len(run.commands):  # a count of 1 may end it
            world = replace(world, second=LARGE)
            other = self._run(replace(world, changed=""))
        self._tell_decisions(run, other)
        self._tell_files(run)
        self._tell_defaults()
        commands = self._marked(run, self._causes(run, other, world))
        rows = (row for row in self.rows if not row.lstrip().startswith("#"))
        return Recording(tuple(commands), tuple(dict.fromkeys(self.told)), tuple(rows))

    def _first(self, world: World) -> tuple[World, ScriptRun]:
        """A run in which values are numbers where they must be, and programs are there."""
        for _ in range(MOST_RUNS):
            run = self._run(world)
            programs, written = run.missing_paths()
            undecided = self._undecided(run)
            undecided += [] if run.starts_program else self._required(run)
            further = replace(
                world,
                numeric=world.numeric | placeholders.to_numbers(run.stderr, run.trace),
                programs=world.programs | programs,
                written=world.written | written,
            )
            if run.stopped or (further == world and not undecided):
                break
            self.names += undecided
            world = further
        return world, run

    def _tests(
        self, run: ScriptRun, differs: Callable[[int, str], bool]
    ) -> Iterator[tuple[int, int, str, list[str]]]:
        """The tests in a trace: place there, line, text, and what they read that isn't known.

        `differs` says whether a traced command depends on what isn't known.
        """
        tainted = {*self.names}
        for at, (line, text) in enumerate(run.trace):
            assigned = ASSIGNED.match(text)
            if assigned and differs(at, text):
                tainted.add(assigned[1])
            if re.match(r"\[\[? |test |\(\( |case ", text):
                source = text if text.startswith("case ") else self._row(line)
                read = [match[1] or match[2] for match in READ.finditer(source)]
                yield at, line, text, names_in(text) or [name for name in read if name in tainted]

    def _undecided(self, run: ScriptRun) -> list[str]:
        """Variables that are set in what was passed over by a test of what isn't known, alone."""
        assigned = {match[1] for _, row in run.trace if (match := ASSIGNED.match(row))}
        found = dict[str, str]()
        for _, line, _, named in self._tests(run, lambda _, text: bool(names_in(text))):
            if named:
                there = placeholders.set_in_block(self.text, line) - assigned
                deciding = ", ".join(sorted({placeholders.shown(name, {}) for name in named}))
                found |= dict.fromkeys(sorted(there - {*self.names, *found}), deciding)
        self.labels |= {name: f"{name}, which {by} decides" for name, by in found.items()}
        return [name for name in found if name not in self.given]

    def _required(self, run: ScriptRun) -> list[str]:
        """Variables that are empty, and without which the script ends itself: `${X:?}`, -z "$X"."""
        found = re.findall(r"(?m)line \d+: (\w+): ", run.stderr)
        for line, row in run.trace:
            if re.match(r"(\[\[? |test ).*-z ''", row):
                found += [match[1] or match[2] for match in READ.finditer(self._row(line))]
        known = {*self.names, *self.given, *placeholders.OWN}
        asked = {m[1] or m[2] for m in READ.finditer(self.call.text)} - known
        return [name for name in dict.fromkeys(found) if name in asked]

    def _run(self, world: World) -> ScriptRun:
        text = self.text
        for name, value in self.given.items():  # what the script leaves to be filled in
            open_ = r"(?:\"\"|''|/@1@/FILL\d+@1@)?(?=\s*(?:#|$))"
            put = shlex.quote(value).replace("\\", r"\\")
            text = re.sub(rf"(?m)^(\s*(?:export\s+)?{name}=){open_}", rf"\g<1>{put}", text)
        for name in self.labels:
            text = text.replace(placeholders.token(name, 1), self._value(name, world))
        # A trace goes on, and where it is read beyond its end, no failure ends it: h is set anyway.
        for letter in "xe" if world.beyond else "x":
            text = re.sub(rf"(?m)^(\s*)set [+-]{letter}(?![a-zA-Z])", r"\1:", text)
            text = re.sub(rf"(?m)^(\s*set [+-][a-zA-Z]*){letter}", r"\1h", text)
        arguments = self.call.arguments
        if not arguments:
            count = placeholders.count_arguments(self.text)
            arguments = tuple(
                "" if placeholders.has_default(text, number) else self._value(f"ARG{number}", world)
                for number in range(1, count + 1)
            )
        env = self._environment(world)
        outcome = self.sandbox.run(replace(self.call, text=text, arguments=arguments), env)
        if sum(data.count(0) for data in outcome.files.values()) > MOST_WORDS:
            raise UsageError(f"{self.call.path}: what it starts has over {MOST_WORDS} words")
        own = [n for n in self.names if not re.search(rf"export\b[^\n]*\b{n}\b", self.call.text)]
        # The script may have put files of its own among the records.
        records = (outcome.files.get(str(number), b"") for number in range(MOST_RECORDS))
        commands = (read_command(record, env, own) for record in records)
        trace, stderr = (
            outcome.files.get(name, b"").decode(errors="replace") for name in ("trace", "stderr")
        )
        return ScriptRun([*filter(None, commands)], read_trace(trace), stderr, outcome.stopped)

    def _value(self, name: str, world: World) -> str:
        second = world.differs(name)
        if name in world.numeric:
            return world.second if second else NUMBER
        return placeholders.token(name, 1 + second)

    def _environment(self, world: World) -> dict[str, str]:
        machine, second = self.machine, world.differs
        mark = placeholders.MARKS[second("")]
        gpus = machine.gpus or (4 if second("GPUS") else 8)
        answers = {
            "HOME": HOME,
            "USER": self._value("USER", world),
            "LOGNAME": self._value("USER", world),
            "LANG": "C.UTF-8",
            "STANDIN_PROGRAMS": " ".join(sorted(world.programs)).replace("@1@", f"@{mark}@"),
            "STANDIN_WRITTEN": " ".join(sorted(world.written)).replace("@1@", f"@{mark}@"),
            "STANDIN_WORLD": mark,
            "STANDIN_NUMBERS": " ".join(sorted(world.numeric)),
            "STANDIN_NUMBER": world.second if second("OUT") else NUMBER,
            "STANDIN_NODES": str(machine.nodes),
            "STANDIN_GPUS": str(gpus),
            "STANDIN_HOST": "host" if second("HOST") else "node",
            "STANDIN_DATE": DATES[second("DATE")],
            "STANDIN_BEYOND": "1" if world.beyond else "",
        }
        jobs = dict[str, str]()
        if machine.batch:
            number = str(4242421 + second("SLURM_JOB_ID"))
            ids = ("JOB_ID", "JOBID")
            jobs = {n: number if n.endswith(ids) else self._value(n, world) for n in PER_JOB}
            jobs |= dict.fromkeys(FOLDERS, str(self.call.cwd))
            jobs |= dict.fromkeys(RANKS, "1" if world.changed == "RANK" else "0")
            jobs |= dict.fromkeys(NODE_LISTS, f"{answers['STANDIN_HOST']}-[0-{machine.nodes - 1}]")
            jobs["PBS_NODEFILE"] = "/run/records/nodes"
        names = {name: self._value(name, world) for name in self.names}
        return {**answers, **jobs, **machine.variables, **names, **self.given}

    # What depends on what

    def _causes(self, run: ScriptRun, other: ScriptRun, world: World) -> dict[PartPlace, list[str]]:
        """What each part depends on that differs: one value is another, each, in a further run.

        A part that shows names is left without, and one that is another on another node has RANK.
        """
        if len(run.commands) != len(other.commands):
            self.tell(1, "how many commands it runs depends on what isn't given")
        differing, causes = (
            differing_parts(run.commands, other.commands),
            dict[PartPlace, list[str]](),
        )
        if world.numeric and world.second != LARGE:  # 24 % N is 0 with 8 and with 1
            third = self._run(replace(world, changed="", second=LARGE))
            differing |= differing_parts(run.commands, third.commands, lost=False)
        if self.machine.batch:
            there = self._run(replace(world, changed="RANK"))
            ranked = differing_parts(run.commands, there.commands, lost=False)
            causes = {place: ["RANK"] for place in ranked}
        parts = [command.parts for command in run.commands]
        differing |= {*causes}
        open_ = {(number, at) for number, at in differing if not names_in(parts[number][at].text)}
        names = ["", "SLURM_JOB_ID", "DATE", "GPUS", "HOST", *sorted(world.numeric), *self.names]
        names.append("OUT")
        tried = [(name, world.second) for name in list(dict.fromkeys(names))[:MOST_NAMES]]
        tried += [(name, LARGE) for name in sorted(world.numeric)]
        for name, count in dict.fromkeys(tried):
            if not open_ - {*causes}:
                break
            # The same world once more, first: what differs then isn't the same each time.
            again = self._run(replace(world, changed=name or None, second=count))
            for place in differing_parts(run.commands, again.commands) & open_:
                if causes.get(place) != [""]:
                    causes.setdefault(place, []).append(name)
        return {place: causes.get(place, []) for place in differing}

    def _marked(
        self, run: ScriptRun, causes: Mapping[PartPlace, list[str]]
    ) -> Iterator[ScriptCommand]:
        """The run's commands, each word marked that depends on what isn't known."""
        for number, command in enumerate(run.commands):
            marked = list[Word]()
            for at, part in enumerate(command.parts):
                reason, text = "", part.text
                if (number, at) in causes or placeholders.PART.search(text):
                    labels = self._shown(names_in(text) or causes.get((number, at), []))
                    reason = labels or "what isn't the same each time"
                    text = readable(text, self.labels)
                elif re.match(r"[^-/].*\.py$", text) and names_in(command.cwd):
                    reason = self._shown(names_in(command.cwd))
                marked.append(Word(self._path(text), command.line, reason))
            words = marked[: len(command.words)]
            words = [replace(w, line=self._line(words, n, w.line)) for n, w in enumerate(words)]
            env = dict.fromkeys(command.env, Word("", 0))  # in their order
            for word in marked[len(words) :]:
                name, _, text = word.text.partition("=")
                env[name] = Word(text, self._named_line(name, word.line), word.unknown)
            cwd = placeholders.TOKEN.sub(r"/\g<0>", command.cwd)
            cwd = self._path(readable(cwd, self.labels))
            yield replace(command, words=tuple(words), env=env, cwd=cwd)

    def _shown(self, names: Iterable[str]) -> str:
        named = filter(None, dict.fromkeys(names))
        return ", ".join(placeholders.shown(name, self.labels) for name in named)

    def _path(self, text: str) -> str:
        """A text with paths as the launcher takes them: relative ones from where it is started."""
        text = text.replace(HOME, "~").replace("/run/beside", str(self.call.folder))
        for folder in {str(self.call.cwd), str(self.call.folder)} - {"/"}:
            inside = rf"(?<![\w.-]){re.escape(folder)}(/[^\s:;,'\"]+)?(?![\w.-])"
            text = re.sub(inside, self._relative, text)
        return text

    def _relative(self, path: re.Match[str]) -> str:
        short = os.path.relpath(path[0], self.call.cwd)
        return short if short.startswith(".") else f"./{short}"

    def _line(self, words: list[Word], at: int, line: int) -> int:
        """The script's line that an option stands on, its values with it."""
        while at and not words[at].text.startswith("--"):
            at -= 1
        return self._named_line(words[at].text.partition("=")[0], line) if at else line

    def _named_line(self, name: str, line: int) -> int:
        pattern = re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")
        rows = enumerate(self.rows, 1)
        found = [n for n, row in rows if pattern.search(row) and not row.lstrip().startswith("#")]
        return max((n for n in found if n <= line), default=found[0] if found else line)

    # What is reported of a run

    def _tell_exits(self, run: ScriptRun) -> None:
        for line, text in run.trace:
            if re.match(r"exit\b", text):
                self.tell(line, f"{text}: passed over, as nothing was started yet")
                return
        self.tell(1, "it ends after a failure here: that is passed over")

    def _tell_decisions(self, run: ScriptRun, other: ScriptRun) -> None:
        """Say which tests are decided by what isn't given, or by files that aren't here."""
        seen, places = set[int](), traced_places(run.trace)
        texts = (text for _, text in other.trace)
        twins = dict(zip(traced_places(other.trace), texts, strict=True))

        def differs(at: int, text: str) -> bool:
            return twins.get(places[at], text) != text or bool(placeholders.PART.search(text))

        for at, line, text, named in self._tests(run, differs):
            row = self._row(line)
            if line in seen or row.startswith("#"):  # which is another script's line
                continue
            case = text.startswith("case ")
            unset = next((n for n in self.tested if re.search(rf"\b{n}\b", row)), "")
            missing = re.search(r"-[defrsxL] (/\S+|'/[^']+')", text)
            if named if case else differs(at, text):
                what = self._shown(named) or "what isn't given"
                self.tell(line, f"{row[:60]}: decided by {what}")
            elif unset:
                self.tell(line, f"{row[:60]}: {unset} is taken as not set")
            elif missing and not missing[1].strip("'").startswith(str(self.call.folder)):
                self.tell(line, f"{row[:60]}: {missing[1]} is treated as missing")
            else:
                continue
            seen.add(line)

    def _tell_files(self, run: ScriptRun) -> None:
        """Say which files it reads further lines from that aren't here, and what bash refuses."""
        for match in re.finditer(r"(?m)line (\d+): (syntax error.*)$", run.stderr):
            self.tell(int(match[1]), f"bash says: {match[2]}")
        for match in re.finditer(r"line (\d+): (\S+): No such file or directory", run.stderr):
            row = self._row(int(match[1]))
            if re.match(r"\s*(source|\.)\s", row):
                path = readable(match[2], self.labels)
                self.tell(int(match[1]), f"{path} isn't here: what it sets isn't known")

    def _tell_defaults(self) -> None:
        """Say which counts have a default in the script because a cluster sets them elsewhere."""
        for line, row in enumerate(self.rows, 1):
            for name, default in COUNTED.findall(row.partition("#")[0]):
                if name not in self.given and name not in self.machine.variables and default:
                    self.tell(line, f"{name} isn't given: {default} is taken")

    def _row(self, line: int) -> str:
        return self.rows[line - 1].strip() if 0 < line <= len(self.rows) else ""
