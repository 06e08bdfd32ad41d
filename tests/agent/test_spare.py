"""Spare nodes: more than are wanted meet, and those that pass the look take part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.ranks import alike, ring

from .conftest import SetGpus, nodes


def node(**more: Any) -> dict[str, Any]:
    """What a node tells of itself."""
    return {"host": "h", "refusal": "", "facts": {"GPUs": "8", "image": ""}} | more


def test_who_refuses_or_differs_from_most_is_unfit() -> None:
    """Compared with the first node alone, all others were at fault where that one differs."""
    odd = {"facts": {"GPUs": "7", "image": "a"}}
    found = dict(alike.unfit([node(**odd), node(), node(refusal="no CUDA device"), node()]))
    assert found == {0: "GPUs: 7, and on most 8", 2: "no CUDA device"}
    assert alike.unfit([node(), node()]) == []


def pairs(*megabytes: float, sent: str = "", at: int = -1) -> list[dict[str, Any]]:
    """What a ring found: so many MB/s to each node from the one before."""
    return [
        {"host": "h", "sent": sent * (n == at), "got": ring.SIZE, "seconds": ring.SIZE / (mb * 1e6)}
        for n, mb in enumerate(megabytes)
    ]


@pytest.mark.parametrize(
    ("found", "worst"),
    [
        (pairs(99, 99, 99), []),
        (pairs(99, 99, 2, 3), [2]),
        (pairs(99, 99, 2, 99), [2]),
        (pairs(99, 99, 99, 99, sent="no route", at=2), [3]),
    ],
)
def test_the_node_of_most_bad_pairs_is_unfit(found: list[dict[str, Any]], worst: list[int]) -> None:
    """Of a slow node both pairs are slow, and its neighbours were blamed for it."""
    assert [*ring.unfit(found)] == worst


@pytest.mark.parametrize("bad", [None, 1])
def test_those_that_pass_the_look_take_part(gpus: SetGpus, tmp_path: Path, bad: int | None) -> None:
    """Of three the last one is spare, or the one that can't start its ranks; it ends with 0.

    A rank of it would have been waited for, and the others are numbered anew.
    """
    gpus(1)
    script = tmp_path / "program.py"
    script.write_text("import os\nprint('rank', os.environ['RANK'], os.environ['WORLD_SIZE'])\n")
    processes = [1 + (number == bad) for number in range(3)]
    with nodes([str(script)], *processes, options=["--wanted", "2"]) as runs:
        pass
    spare = 2 if bad is None else bad
    assert [run.code for run in runs] == [0, 0, 0], runs
    said = [re.findall(r"^rank \d \d$", run.output, re.MULTILINE) for run in runs]
    told = ["rank 0 2"], ["rank 1 2"]
    assert said == ([told[0], [], told[1]] if spare == 1 else [*told, []])
    assert "this one is spare" in runs[spare].output
    assert f"going on without node {spare}:" in runs[0].output
    assert ("2 processes on 1 visible" in runs[0].output) == (bad is not None)
