"""Nodes that fail: which one it was, for what cause of its own, and which ones to leave out."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from launcher.runs.plan.job import ExitStatus
from launcher.runs.records import record
from launcher.runs.runfile.clusters import Exclude

LINE = re.compile(r"^(?:node-(\d+) \| )?(.*)$", re.MULTILINE)
NAMED = re.compile(r"\bnode (\d+) \(([\w-]*)")
OF_OTHERS = {
    "its processes are held": re.compile(r"node \d+ \(.*\): its process (?:is held|was killed)"),
    "it was lost": re.compile(r"node \d+ \(.*\) has gone: "),
}
"""What other nodes say of one."""

PAIR = re.compile(r"\bnode (\d+)(?: \(.*?\))? to node (\d+) \(.*?\): ")
"""Of two nodes one doesn't reach the other, or slowly: the one that is in several is to blame."""

BY_SLURM = re.compile(
    r"^(?:job \| )?srun: error: Node failure on ([A-Za-z0-9][\w.-]*)", re.MULTILINE
)
ENDED_BY_SLURM = "Slurm ended job "


@dataclass(frozen=True)
class NodeFailure:
    """A failure that was on a node; `cause` is one of its own, "" for the program's."""

    node: str
    cause: str
    run: str
    ended: str


def blame(ended: ExitStatus, log: str) -> tuple[str, str]:
    """The machine that a run failed on, and the cause where that is its own; ("", "") for none.

    What several nodes say of themselves is none's own: a full disk is then one that all share.
    """
    if found := BY_SLURM.search(log):
        return found[1], "it was lost"
    if ended.why.startswith(ENDED_BY_SLURM):
        return "", ""
    hosts = dict(enumerate(ended.hosts))
    for cause, accused in _accused(log, hosts):
        if len(accused) == 1 and min(accused):
            return min(accused), cause
    first = re.match(r"(?:on )?node-(\d+)", ended.why)
    return hosts.get(int(first[1]) if first else 0, ""), ""


def _accused(log: str, hosts: Mapping[int, str]) -> Iterator[tuple[str, set[str]]]:
    """Each cause, and the machines that it names, "" for one that isn't known."""
    from launcher.runs.explain.failures import pattern, table

    lines = [(int(rank or 0), text) for rank, text in LINE.findall(log)]
    for known in table():
        if known.of_node:
            said = pattern(known)
            yield known.name, {hosts.get(rank, "") for rank, text in lines if said.search(text)}
    # Where nodes are left out the others are numbered anew, and are known by their names.
    named = {int(number): name for number, name in NAMED.findall(log) if name in hosts.values()}
    numbered = {**hosts, **named}
    for cause, said in OF_OTHERS.items():
        heard = [NAMED.search(found[0]) for _, text in lines if (found := said.search(text))]
        yield cause, {numbered.get(int(one[1]), "") for one in heard if one}
    pairs = {found.groups() for _, text in lines if (found := PAIR.search(text))}
    counts = Counter(int(node) for pair in pairs for node in pair)
    worst = [n for n, times in counts.items() if times == max(counts.values()) > 1]
    yield "its link is slow or broken", {numbered.get(node, "") for node in worst}


def failures(since: datetime | None = None) -> list[NodeFailure]:
    """Those of all runs that are recorded, the newest first."""
    found = list[NodeFailure]()
    for kept in record.each():
        for told in record.read_lines(record.folder(kept.run) / record.ENDINGS):
            words = [told.get(key) for key in ("node", "node_cause", "ended")]
            if words[0] and all(isinstance(word, str) for word in words):
                node, cause, ended = map(str, words)
                if not since or datetime.fromisoformat(ended) >= since:
                    found.append(NodeFailure(node, cause, kept.run, ended))
    return sorted(found, key=lambda one: one.ended, reverse=True)


def left_out(asked: Exclude, now: datetime | None = None) -> dict[str, Sequence[str]]:
    """The nodes that failed too often, and the causes, which are their own."""
    since = (now or datetime.now(timezone.utc)) - timedelta(days=asked.days)
    causes: dict[str, list[str]] = {}
    for one in failures(since):
        if one.cause:
            causes.setdefault(one.node, []).append(one.cause)
    return {node: told for node, told in sorted(causes.items()) if len(told) >= asked.failures}
