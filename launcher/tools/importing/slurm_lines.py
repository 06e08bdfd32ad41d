"""Parses the #SBATCH lines of a script: nodes, GPUs, tasks, and the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest

from launcher.base.yamlfile import printable
from launcher.tools.importing.shell import Unfollowed
from launcher.tools.importing.words import Word

SHORT = {"N": "nodes", "c": "cpus-per-task", "t": "time", "p": "partition", "A": "account"}
SHORT |= {"q": "qos", "C": "constraint", "d": "dependency", "a": "array"}
"""Short options, as far as they count here: https://slurm.schedmd.com/sbatch.html"""
COUNTS = {
    "nodes": r"(\d+)",
    "ntasks-per-node": r"(\d+)",
    "cpus-per-task": r"(\d+)",
    "gpus-per-node": r"(?:\w+:)?(\d+)",
    "gres": r"gpu(?::[A-Za-z]\w*)?(?::(\d+))?",
}
"""What is read of an option's value: a whole number; `gres=gpu` alone asks for one."""
KEYS = tuple("time partition account qos constraint reservation dependency array requeue".split())
"""Those that the section slurm of a run file has a key for, by the same name."""

VARIABLES = {
    "SLURM_NNODES": "nodes",
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_CPUS_PER_TASK": "cpus-per-task",
    "SLURM_GPUS_PER_NODE": "gpus-per-node",
    "SLURM_GPUS_ON_NODE": "gpus-per-node",
}
"""What Slurm sets in a job to what the option asks for (the same page, output variables)."""


@dataclass
class SbatchRequest:
    """How many of each the #SBATCH lines ask for; None for what none of them names.

    `keys` are for the section slurm of a run file.
    """

    nodes: Word | None = None
    gpus: Word | None = None
    tasks: Word | None = None
    variables: dict[str, str] = field(default_factory=dict)
    keys: dict[str, Word] = field(default_factory=dict)
    left: list[Unfollowed] = field(default_factory=list)


def parse_sbatch(text: str) -> SbatchRequest:
    """What the #SBATCH lines of the script `text` ask for; the last of several counts."""
    counts, asked = dict[str, Word](), SbatchRequest()
    for line, told, name, value in _options(text):
        if name in KEYS:
            asked.keys[name] = Word(value, line)
            continue
        found = re.fullmatch(COUNTS[name], value) if name in COUNTS else None
        if found:
            key = "gpus-per-node" if name == "gres" else name
            counts[key] = Word(str(int(found[1] or 1)), line)
        if not found or name == "cpus-per-task":
            asked.left.append(Unfollowed(line, f"#SBATCH {told}: not carried over"))
    asked.nodes, asked.gpus = counts.get("nodes"), counts.get("gpus-per-node")
    asked.tasks = counts.get("ntasks-per-node")
    asked.variables = {n: counts[key].text for n, key in VARIABLES.items() if key in counts}
    return asked


def _options(text: str) -> Iterator[tuple[int, str, str, str]]:
    """The line, the text, the long name and the value of each option, up to the first command."""
    for line, row in enumerate(text.splitlines(), 1):
        if row.strip() and not row.startswith("#"):
            return
        words = row[len("#SBATCH") :].split() if re.match(r"#SBATCH\s", row) else []
        with suppress(ValueError):  # a quote that isn't closed
            words = shlex.split(row[len("#SBATCH") :], comments=True) if words else []
        for word, following in zip_longest(words, words[1:], fillvalue=""):
            value = "" if following.startswith("-") else following
            name, equals, own = word.lstrip("-").partition("=")
            if word.startswith("--"):
                told = word if equals or not value else f"{word}={value}"
                yield line, printable(told), name, own if equals else value
            elif word.startswith("-"):
                own = word[2:]
                told = word if own else f"{word} {value}".rstrip()
                yield line, printable(told), SHORT.get(word[1:2], ""), own or value
