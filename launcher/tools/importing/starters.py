"""What stands around a start: Slurm, PBS, MPI and containers, with their options."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from launcher.base.errors import UsageError
from launcher.base.yamlfile import printable
from launcher.runs.runfile.values import parse_gpus
from launcher.tools.importing.commands import Report, ScriptCommand, Word

TABLE = Path(__file__).with_suffix(".yaml")
GPUS = re.compile(r"(?:gpu(?::|$))?(?:([A-Za-z][\w.-]*)(?::|$))?(\d*)")
COUNT = re.compile(r"(?:[A-Za-z][\w.-]*:)?(\d+)")


HELD = "options in a variable"


@cache
def tables() -> Mapping[str, Any]:
    """The families of starters.yaml, which says what their keys are."""
    found = yaml.safe_load(TABLE.read_text("utf-8"))
    for rows in found.values():
        rows |= {key: rows[key].split() for key in ("names", "flags", "takes") if key in rows}
        rows["verbs"] = rows.get("verbs", "").split()
        if "does" in rows:
            rows["short"] = dict(one.split("=") for one in rows["short"].split())
            rows["does"] |= dict.fromkeys(rows["itself"].split(), "itself")
    return dict(found)


def family_of(name: str) -> str:
    """The family of a command, "" for none."""
    return next((one for one, rows in tables().items() if name in rows.get("names", ())), "")


@dataclass(frozen=True)
class ScriptMount:
    """A folder of the host in a container."""

    source: str
    target: str
    read_only: bool = False


@dataclass
class ScriptContext(Report):
    """What the starters ask for: counts, Slurm's options, and the container."""

    counts: dict[str, Word] = field(default_factory=dict)
    slurm: dict[str, Word] = field(default_factory=dict)
    container: str = ""
    image: Word = field(default_factory=lambda: Word("", 0))
    gpus: str = ""
    mounts: list[ScriptMount] = field(default_factory=list)
    env: dict[str, Word] = field(default_factory=dict)
    resources: dict[str, Word] = field(default_factory=dict)

    def outside(self, path: str) -> str:
        """The host's path of one in the container; one that isn't mounted stays as it is."""
        for mount in sorted(self.mounts, key=lambda mount: -len(mount.target)):
            if path == mount.target or path.startswith(f"{mount.target.rstrip('/')}/"):
                return mount.source + path[len(mount.target) :]
        return path


def batch_lines(text: str) -> ScriptContext:
    """What the #SBATCH and #PBS lines up to the first command ask for."""
    found = ScriptContext()
    for line, row in enumerate(text.splitlines(), 1):
        if row.strip() and not row.startswith("#"):
            break
        match = re.match(r"#(SBATCH|PBS|\$|BSUB)\s+(\S.*)", row)
        if not match:
            continue
        words = match[2].split()
        with suppress(ValueError):  # a quote that isn't closed
            words = shlex.split(match[2], comments=True)
        if match[1] == "SBATCH":
            _ask(found, "slurm", "#SBATCH", [Word(word, line) for word in words])
        elif match[1] == "PBS":
            _pbs(found, match[2], line)
        else:
            found.tell(line, f"{printable(row.strip())}: not carried over")
    return found


def variables(counts: Mapping[str, int]) -> dict[str, str]:
    """What Slurm sets in a job that asks for these counts."""
    known, nodes = dict(counts), counts.get("nodes", 1)
    if "tasks" in known:
        known.setdefault("ntasks", nodes * known["tasks"])
    elif "ntasks" in known:
        known["tasks"] = -(-known["ntasks"] // nodes)
    names = tables()["slurm"]["variables"]
    return {name: str(known[key]) for name, key in names.items() if key in known}


def parse_around(asked: ScriptContext, commands: Sequence[ScriptCommand]) -> ScriptContext:
    """What the batch lines and the commands around a start ask for; `asked` is added to."""
    for command in commands:
        family, words = family_of(command.name), command.words[1:]
        named = family if family in ("apptainer", "mpirun") else command.name
        if family and (verbs := tables()[family]["verbs"]):
            family = family if words and words[0].text in verbs else ""
            asked.container, words = named if family else asked.container, words[1:]
        if family:
            _ask(asked, family, named, words)
        elif command.name not in ("bash", "sh", "env", "sudo", "exec", "nohup", "time"):
            text = printable(" ".join(word.text for word in command.words[:2]))
            asked.tell(command.line, f"{text} …: how it starts the program isn't carried over")
    return asked


def options(family: str, words: Sequence[Word]) -> tuple[list[tuple[str, Word]], Sequence[Word]]:
    """A starter's options by their long names, each with its value; and the words behind them.

    A variable that isn't known, and may be options of what starts ranks, has the name HELD.
    """
    table, found, at = tables()[family], list[tuple[str, Word]](), 0
    while _is_option(words, at) or _is_held(table, words, at):
        word, at = words[at], at + 1
        if word.text == "--":
            break
        name, equals, value = word.text.lstrip("-").partition("=")
        if family == "slurm" and not word.text.startswith("--") and len(word.text) > 2:
            name, equals, value = word.text[1], "=", word.text[2:].removeprefix("=")
        if "takes" in table:
            name = name.replace("-", "_")
            takes = name in table["takes"]
        else:
            name = table["short"].get(name, name)
            takes = name not in table["flags"] and not _is_option(words, at)
        if equals:
            found.append((name, replace(word, text=value)))
        elif takes and at < len(words):
            found.append((name, words[at]))
            at += 1
        else:
            held = not word.text.startswith("-")
            found.append((HELD, word) if held else (name, replace(word, text="")))
    return found, words[at:]


def _is_option(words: Sequence[Word], at: int) -> bool:
    return at < len(words) and words[at].text.startswith("-") and words[at].text != "-"


def _is_held(table: Mapping[str, Any], words: Sequence[Word], at: int) -> bool:
    """Whether a word is options in a variable: a program comes before the next long option."""
    if at == len(words) or not (table.get("takes") and words[at].unknown):
        return False
    known = takewhile(lambda word: not word.text.startswith("--"), words[at + 1 :])
    return words[at].text[-3:] != ".py" and any(word.text.endswith(".py") for word in known)


def _ask(found: ScriptContext, family: str, named: str, words: Sequence[Word]) -> None:
    """Note what the options of a starter ask for, up to the first word that is none."""
    table = tables()[family]
    asked, behind = options(family, words)
    for name, word in asked:
        what, _, key = table["does"].get(name, table["other"]).partition("=")
        if _is_noted(found, name, word, what, key):
            continue
        if word.unknown:
            found.tell(word.line, f"{word.unknown}: {named}'s {name} isn't carried over")
        else:
            text = printable(f"{named}'s {name} {word.text}".rstrip())
            found.tell(word.line, f"{text}: not carried over")
    if behind and table["verbs"]:
        found.image = behind[0]


def _is_noted(found: ScriptContext, name: str, word: Word, what: str, key: str) -> bool:
    """Whether an option's value is noted in its place, or the launcher needs none of it."""
    text, known = word.text, not word.unknown
    if what == "itself":
        return not key or text == key
    if what in ("count", "cpus"):
        number = COUNT.fullmatch(text)
        if number or not known:
            found.counts[key] = replace(word, text=number[1] if number else text)
        if what == "cpus":
            found.slurm[name] = word
        return bool(number) or not known
    if what == "gpus" and known and (match := GPUS.fullmatch(text)):
        if name == "gres" and not text.startswith("gpu"):
            return False
        found.counts["gpus"] = Word(match[2] or "1", word.line)
        if match[1]:
            found.slurm["gpu_type"] = Word(match[1], word.line)
        return True
    if what == "ppr":
        if per := re.match(r"ppr:(\d+):node", text):
            found.counts["tasks"] = Word(per[1], word.line)
        return True
    if what == "hosts":
        count = replace(word, text=str(len(text.split(","))))
        found.counts.setdefault("nodes", count)
        return False
    if what == "memory" and (size := re.fullmatch(r"([1-9]\d*)([KMGT]?)B?", text)):
        found.resources["memory"] = Word(f"{size[1]}{size[2] or 'M'}", word.line)
        return True
    if what == "signal" and (seconds := re.search(r"@(\d+)$", text)):
        word = Word(seconds[1], word.line)
    if what in ("option", "memory", "signal"):
        found.slurm[key or name] = word
        return True
    if what == "image":
        found.container, found.image = key, word
        return True
    if what == "env":
        for part in text.split(key) if key else [text]:
            variable, equals, value = part.partition("=")
            if equals:
                found.env[variable] = replace(word, text=value)
        return True
    return known and _is_of_container(found, word, what, key)


def _is_of_container(found: ScriptContext, word: Word, what: str, key: str) -> bool:
    """Whether a container's mounts, GPUs or resources are noted."""
    text = word.text
    if what == "mounts":
        mounts = [*map(_mount, text.split(key) if key else [text] if ":" in text else [""])]
        found.mounts += filter(None, mounts)
        return all(mounts)
    if what == "mount":
        parts = dict(part.partition("=")[::2] for part in text.split(","))
        source, target = parts.get("source") or parts.get("src"), parts.get("target")
        mount = _mount(f"{source or ''}:{target or parts.get('dst', '')}")
        found.mounts += [replace(mount, read_only="readonly" in parts)] if mount and source else []
        return bool(mount and source)
    if what == "devices":
        with suppress(UsageError):
            parse_gpus(gpus := text.strip("\"'"))
            found.gpus = gpus
            return True
    if what in ("resource", "resources"):
        before = found.resources[key].text if what == "resources" and key in found.resources else ""
        found.resources[key] = Word(f"{before} {text}".strip(), word.line)
        return True
    return False


def _pbs(found: ScriptContext, text: str, line: int) -> None:
    """A #PBS line: select=32:ngpus=8, nodes=4:ppn=8:gpus=8, walltime=…, -N, -q, -A."""
    for name, key in (("-q", "partition"), ("-A", "account"), ("-P", "account"), ("-N", "name")):
        if match := re.match(rf"{name}\s+(\S+)", text):
            if name == "-N":
                found.slurm["name"] = Word(match[1], line)
            else:
                found.tell(line, f"#PBS {text}: with Slurm it is slurm.{key}")
            return
    known = re.sub(r"(?:rt_\w+|select|nodes)=(\d+)|ngpus=(\d+)|gpus=(\d+)|mpiprocs=(\d+)", "", text)
    for pattern, key in (
        (r"(?:select|nodes)=(\d+)", "nodes"),
        (r"gpus=(\d+)", "gpus"),
        (r"mpiprocs=(\d+)", "tasks"),
    ):
        if match := re.search(pattern, text):
            found.counts[key] = Word(match[1], line)
    if re.search(r"\w", known.removeprefix("-l").strip(" :,")):
        found.tell(line, f"#PBS {printable(text)}: not carried over but for its counts")


def _mount(text: str) -> ScriptMount | None:
    """A mount as outer:inner:mode, None for what is none."""
    outer, colon, rest = text.partition(":")
    inner, _, mode = rest.partition(":")
    inner = inner if colon else outer
    if not inner.startswith("/"):
        return None
    return ScriptMount(outer.rstrip("/") or "/", inner.rstrip("/") or "/", mode == "ro")


def exported(command: ScriptCommand, around: Sequence[ScriptCommand]) -> Mapping[str, Word]:
    """The variables that the ranks have from the script: within a container, what is set inside."""
    for outer in around:
        if family_of(outer.name) == "docker":
            return {n: w for n, w in command.env.items() if outer.env.get(n) != w}
    return command.env
