"""Lines of a log: their words without prefixes, who says them, on which rank and node, and when."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

LONGEST_QUOTE = 160
MOST_PREFIXES = 8
"""Before a line's words; what has more is prose."""

PREFIX = re.compile(
    r"""\s*(?:
      (?P<rank>\[(?:rank|default|trainer)?\d+(?:\|\d+)?\]:?(?=[\ \[])  # torchrun, ours, mpirun
        | \[\d+,\d+\]<std(?:out|err)>:                              # mpirun
        | \d{1,5}:(?=\ )                                            # srun --label
        | node-\d+\ \|                                              # ours
      | (?!(?:slurm|srun|python|docker|podman|collect2|cc1)[\w.-]*:|\S*\.so\b)  # pdsh: a node
        (?:\d{1,3}(?:\.\d{1,3}){3}|[a-z][a-z\d-]*\d(?:\.[a-z\d-]+)*):(?=\ \S)
        | \((?:raylet|[\w.:]*\ ?pid=\d+)[^)]*\) )                   # Ray
    | [A-Za-z<][\w.<>-]*:\d+:\d+\ \[\d+\]                           # NCCL
    | \[[\w.-]+:\d+(?:\ *:\d+){0,2}\](?=\ )                         # UCX, Open MPI
    | \x1b?\[\d[\d;]*m                                              # a colour
    | \[?\d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?:?
    | \[?\d\d[/-]\d\d(?:[/-]\d\d)?\ \d\d:\d\d:\d\d(?:[.,]\d+)?\]?
    | \[(?:\d\d:\d\d:\d\d|\d{10}\.\d+)\]
    | [A-Z][a-z]{2}\ [A-Z][a-z]{2}\ +\d+\ \d\d:\d\d:\d\d\ \d{4}
    | [A-Z][a-z]{2}\ [\ \d]\d\ \d\d:\d\d:\d\d\ \S+(?=\ \w)          # syslog, with its host
    | [EWIF]\d{4}\ [\d:.]+\ +(?:\d+\ )?\S+:\d+\]                    # glog
    | \[(?:ERROR|INFO|WARN(?:ING)?|DEBUG|CRITICAL)\]
    | (?:ERROR|INFO|WARNING|DEBUG|CRITICAL)(?=\ +\[)
    | \[\d+/[\w/-]+\ \(pid\ \d+\)\] | \[[0-9a-f]{8}-[0-9a-f-]{27}\]
    | \[?std(?:err|out)\]?:?(?:\ [FP](?=\ ))?
    | [│|>] | E(?=\ {3})                                            # rich, mail, pytest
    )""",
    re.VERBOSE,
)
"""What stands before a line's words: a rank or node, a time, a level."""

RANK = re.compile(r"\[(?:rank|default)?(\d+)\]:|\b[Rr]ank[ =:](\d+)\b|^ *(\d+): ")
NODE = re.compile(r"^(node-\d+) \| |^([A-Za-z][\w.-]*):\d+:\d+ \[\d+\]|\bON (\S+) CANCELLED\b")
TIME = re.compile(r"\b(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?\b")

WARNING = re.compile(
    r"\bWARNING\b|\b(?:User|Future|Deprecation|Runtime|Resource)Warning: |\[W[ \d:]|^W\d{4} "
)
"""A line at the level of a warning: loggers', Python's, torch's and glog's."""

OLD_WARNING = re.compile(r"(\b\w+\.(?:cc|cu|h):\d+) WARN ")
ESCAPED = re.compile(r'\\+"')
"""A quote in a message that an engine passed on as a string."""

IGNORED = re.compile(
    r"Exception ignored|Error in atexit|.{0,24}matching Triton|\S*ld: cannot find -l(?:aio|cufile)"
)
"""The words of Python, xFormers and DeepSpeed's probes before an error that ends nothing."""
LAST_ERROR = "Last error:"
WARNS = "NCCL WARN "
"""NCCL's warning; torch repeats the last one, whatever NCCL_DEBUG is, in a line of its own."""

SPEAKERS = (
    ("runner", re.compile(r"runner: ")),
    ("nccl", re.compile(r"(?:\S+:\d+ )?NCCL (?:WARN|INFO) ")),
    ("ucx", re.compile(r"(?:\S+:\d+ +)?UCX +[A-Z]+ |ib_mlx5_log\.c|Caught signal \d+ \(")),
    (
        "scheduler",
        re.compile(
            r"(?:slurm(?:stepd|d|ctld)[\w.-]*(?:\[\d+\])?|srun|sbatch|salloc|error): |"
            r".*\bkubelet\b|.*default-scheduler|(?:Reason|Message|State|Status): |"
            r"(?:\S+ +)?(?:Warning|Normal) +[A-Z]\w+ "
        ),
    ),
    (
        "engine",
        re.compile(
            r"docker: |Error response from daemon|.*OCI runtime|nvidia-container-cli|"
            r"(?:Error|podman): (?:error )?(?:setting up CDI|unresolvable|stat |creating)|"
            r"\[FATAL tini|enroot|pyxis: "
        ),
    ),
    (
        "kernel",
        re.compile(r"(?:kernel: |\[ *\d+\.\d+\] )*(?:NVRM: |Out of memory: |oom-kill)|kernel: "),
    ),
    (
        "shell",
        re.compile(
            r"(?:\S*(?:sh|script|\.sbatch|bash)|/\S+): (?:line )?\d+: |Killed$|"
            r"(?:Aborted|Segmentation fault|Bus error|Terminated)(?: \(core dumped\))?$"
        ),
    ),
)
"""Who says a line, by how its words begin; all others are the program's, or a library's in it."""

PROGRAM = "program"


@dataclass(frozen=True)
class LogLine:
    """A line of a log: its number from 1, its text, and the rank, node and time that it names.

    raised_by: where in Megatron, and for which options, "" where that isn't known.
    """

    line: int
    text: str
    rank: str = ""
    node: str = ""
    time: str = ""
    raised_by: str = ""

    @property
    def where(self) -> str:
        """The line's number, and who wrote it when, as far as it says so."""
        rank = f"rank {self.rank}" if self.rank else ""
        return ", ".join(filter(None, (f"line {self.line}", self.node, rank, self.time)))


class Words(NamedTuple):
    """A line: its number from 1, the whole line, its words alone, and which rank wrote it."""

    number: int
    raw: str
    text: str
    source: str = ""

    @property
    def speaker(self) -> str:
        """Who says it: runner, nccl, ucx, scheduler, engine, kernel, shell or program."""
        text = self.text.lstrip()
        return next((name for name, begins in SPEAKERS if begins.match(text)), PROGRAM)

    @property
    def warns(self) -> bool:
        """Whether it calls itself a warning."""
        return bool(WARNING.search(self.raw))

    @property
    def quoted(self) -> LogLine:
        """The line as far as it fits on one of the launcher's, and what it says of itself."""
        rank, node = (
            next(filter(None, match.groups()), "") if (match := known.search(self.raw)) else ""
            for known in (RANK, NODE)
        )
        time = match[0] if (match := TIME.search(self.raw)) else ""
        text = self.raw.strip()
        text = text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"
        return LogLine(self.number, text, rank, node, time)


def parse(number: int, raw: str) -> Words:
    """The words of a line, and its source: the rank or node that a prefix names, "" for none."""
    at, source = 0, ""
    for _ in range(MOST_PREFIXES):
        if not (match := PREFIX.match(raw, at)) or match.end() == at:
            break
        at, source = match.end(), source + (match["rank"] or "")
    text = raw[at + 1 :] if raw[at : at + 1] == " " else raw[at:]
    if '\\"' in text:
        text = ESCAPED.sub('"', text)
    if " WARN " in text:
        text = OLD_WARNING.sub(r"\1 NCCL WARN ", text, count=1)
    return Words(number, raw, text, source)


def by_source(lines: list[Words]) -> list[Words]:
    """The lines with those of each rank together, in the order in which ranks begin.

    NCCL's last warning as torch repeats it becomes NCCL's own; an ignored exception is emptied.
    """
    groups: dict[str, list[Words]] = {}
    for line in lines:
        groups.setdefault(line.source, []).append(line)
    ordered = [line for group in groups.values() for line in group]
    ignored, source = False, ""
    for index, line in enumerate(ordered):
        ignored, source = ignored and line.source == source, line.source
        goes_on = ignored and line.text.startswith((" ", "Traceback"))
        if ignored and not goes_on and "killed by signal" not in line.text:
            ordered[index] = line._replace(text="")
        ignored = goes_on or bool(IGNORED.match(line.text))
    for index, (before, line) in enumerate(pairwise(ordered), start=1):
        if before.text.strip() == LAST_ERROR and not line.text.startswith(WARNS):
            ordered[index] = Words(line.number, line.raw, WARNS + line.text, line.source)
    return ordered
