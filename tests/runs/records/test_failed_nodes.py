"""Which machine a failure was on, by what the nodes wrote, and which ones are left out."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from launcher.agent.ranks import ring
from launcher.cli import main
from launcher.runs.plan.job import ExitStatus
from launcher.runs.records import failed_nodes, record
from launcher.runs.records.ending import Ending
from launcher.runs.runfile.clusters import Exclude, Kubernetes, Slurm

HOSTS = ("n0", "n1", "n2")
NOW = datetime(2026, 1, 9, tzinfo=timezone.utc)
XID = "node-1 | NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"


DISK = "OSError: [Errno 28] No space left on device\n"


def gone(node: str, other: str, why: str = "it ended without a word") -> str:
    """What a node writes of another one, by its number and host."""
    return f"{node} | runner: node {other} has gone: {why}\n"


def found(*megabytes: float) -> list[dict[str, object]]:
    """What a ring found: so many MB/s to each node from the one before, or nothing."""
    return [
        {
            "host": "h",
            "sent": "",
            "got": ring.SIZE * bool(mb),
            "seconds": ring.SIZE / 1e6 / (mb or 1),
        }
        for mb in megabytes
    ]


def said(lines: list[str]) -> str:
    return "".join(f"node-0 |   {line}\n" for line in lines)


@pytest.mark.parametrize(
    ("log", "why", "blamed"),
    [
        (XID, "node-0: rank 0 exited with code 1", ("n1", "a GPU is broken")),
        ("node-2 | NVRM: Xid (PCI:0000:3b:00): 31, MMU fault\n", "on node-2", ("n2", "")),
        (
            "node-2 | CUDA error: uncorrectable ECC error\n",
            "",
            ("n2", "a GPU is broken"),
        ),
        (gone("node-0", "2 (h)") + gone("node-1", "2 (h)"), "", ("n2", "it was lost")),
        (
            "".join(gone("node-0", f"{node} (h)", "the link is cut") for node in (1, 2)),
            "on node-0",
            ("n0", ""),
        ),
        (
            "node-0 | runner: the nodes get no all-reduce done:\n"
            "node-0 |   node 1 (h): its process is held, and has reported nothing for 4 s\n",
            "",
            ("n1", "its processes are held"),
        ),
        (
            said(ring.slow(found(99, 2, 3))),
            "",
            ("n1", "its link is slow or broken"),
        ),
        (gone("node-0", "1 (n2.cluster)"), "on node-0", ("n2", "it was lost")),
        (said(ring.broken(found(99, 0, 0))), "", ("n1", "its link is slow or broken")),
        (said(ring.slow(found(99, 2, 99))), "on node-0", ("n0", "")),
        (f"node-2 | {DISK}", "", ("n2", "a disk is full")),
        (
            f"node-2 | {DISK}node-0 | {DISK}",
            "node-2: rank 4 exited with code 1",
            ("n2", ""),
        ),
        (
            "job | srun: error: Node failure on n2\n",
            "Slurm ended job 1",
            ("n2", "it was lost"),
        ),
        (gone("node-0", "2 (h)"), "Slurm ended job 1: TIMEOUT", ("", "")),
        ("node-1 | AssertionError\n", "node-1: rank 3 exited with code 1", ("n1", "")),
    ],
)
def test_a_failures_node_and_its_own_cause(log: str, why: str, blamed: tuple[str, str]) -> None:
    """A program's failure, a disk that all share or a time limit would have cost a good node."""
    assert failed_nodes.blame(ExitStatus(1, why=why, hosts=HOSTS), log) == blamed


def test_where_no_scheduler_chose_the_machines_none_is_blamed() -> None:
    assert failed_nodes.blame(ExitStatus(1, why="node-1: rank 3 exited with code 1"), XID) == (
        "",
        "",
    )


def test_a_run_that_was_stopped_blames_none() -> None:
    found = Ending(ExitStatus(1, hosts=HOSTS), True, XID)
    assert found.blamed == ("", "")


def failed(folder: Path, run: str, node: str, cause: str, days: float) -> None:
    """The record of a run that failed so many days ago."""
    (folder / run).mkdir(parents=True)
    kept = {"run": run, "name": "a", "created": "", "backend": "slurm", "cwd": "", "file": ""}
    kept |= {"config": {}, "rest": [], "processes": 1}
    (folder / run / record.FILE).write_text(json.dumps(kept))
    ended = (NOW - timedelta(days=days)).isoformat()
    told = {"attempt": 0, "ended": ended, "node": node, "node_cause": cause}
    (folder / run / record.ENDINGS).write_text(f"{json.dumps(told)}\n")


def test_a_node_that_failed_twice_in_a_week_is_left_out(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once may be chance, long ago repaired, and a program's failure is on any node."""
    for number, (node, cause, days) in enumerate(
        [
            *(("twice", "a GPU is broken", days) for days in (1, 6)),
            *(("once", "a GPU is broken", days) for days in (1, 8)),
            *(("program", "", days) for days in (1, 2, 3)),
        ]
    ):
        failed(runs, f"0a1b2c3{number}", node, cause, days)
    assert failed_nodes.left_out(Exclude(), NOW) == {"twice": ["a GPU is broken"] * 2}
    assert {*failed_nodes.left_out(Exclude(failures=1), NOW)} == {"twice", "once"}
    assert {*failed_nodes.left_out(Exclude(days=9), NOW)} == {"twice", "once"}
    assert main(["nodes"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].split() == ["NODE", "FAILURES", "OWN", "CAUSES", "LAST", "RUNS"]
    assert told[3].split()[:3] == ["twice", "2", "2"]
    assert main(["nodes", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 7
    assert {*lines[0]} == {"node", "cause", "run", "ended"}


@pytest.mark.parametrize("model", [Slurm, Kubernetes])
def test_auto_is_its_usual_numbers(model: type[Slurm | Kubernetes]) -> None:
    assert model.model_validate({"exclude": "auto"}).exclude == Exclude(failures=2, days=7)
    assert model.model_validate({"exclude": {"days": 1}}).exclude == Exclude(failures=2, days=1)
    assert model(exclude=None).exclude is None
