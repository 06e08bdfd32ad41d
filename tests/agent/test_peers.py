"""Nodes while their ranks run: who fails or goes is told to all, and ends them."""

from __future__ import annotations

import builtins
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue

import pytest

from launcher.agent import diverged
from launcher.agent.ranks import rendezvous
from launcher.agent.ranks.command_line import free_port
from launcher.agent.ranks.peers import PeerNodes, RemoteFailure
from launcher.agent.ranks.rendezvous import NodeNotNeeded, Rendezvous
from launcher.agent.words import DIVERGED
from tests.machines import FIRST, ip

from .conftest import Run, SetGpus, environment, nodes
from .test_alike import together

HOST = socket.gethostname()
WITHIN = 10.0

FAILS = """\
import os, sys, time
print("there", flush=True)
open(sys.argv[1] + os.environ["NODE_RANK"], "w").close()
while len(os.listdir(os.path.dirname(sys.argv[1]))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.02)
if os.environ["NODE_RANK"] == sys.argv[2]:
    sys.exit(int(sys.argv[3]))
time.sleep(600)
"""
"""A rank that waits for ever, on one node for a moment: it has nothing by which it would know."""


@contextmanager
def failing(folder: Path, number: int, node: int, code: int) -> Iterator[list[Run]]:
    """So many nodes of one rank each, of which that one ends with a code."""
    (script := folder / "program.py").write_text(FAILS)
    (folder / "there").mkdir()
    with nodes([str(script), f"{folder}/there/", str(node), str(code)], *[1] * number) as runs:
        yield runs


def test_the_first_failure_ends_all_with_its_code(gpus: SetGpus, tmp_path: Path) -> None:
    """The others' ranks would wait until their time-out, half an hour later."""
    gpus(1)
    with failing(tmp_path, 3, node=1, code=3) as runs:
        pass
    assert [run.code for run in runs] == [3, 3, 3], runs
    for run in (runs[0], runs[2]):
        first = re.findall(r"runner: (?!SIG|GLOO|all-reduce)(.*)", run.output)[0]
        assert first == f"node 1 ({HOST}): rank 1 exited with code 3"
        assert "rank 0" not in run.output


def test_a_runner_that_is_killed_ends_the_others(gpus: SetGpus, tmp_path: Path) -> None:
    gpus(1)
    with failing(tmp_path, 2, node=9, code=0) as runs:
        while "there" not in runs[1].line():
            pass
        runs[1].process.send_signal(signal.SIGKILL)
    assert runs[0].code == 1
    assert f"runner: node 1 ({HOST}) has gone: it ended without a word" in runs[0].output


def test_a_node_that_is_done_is_not_missed() -> None:
    def run(here: Rendezvous) -> list[RemoteFailure]:
        heard: SimpleQueue[RemoteFailure] = SimpleQueue()
        peers = PeerNodes(here, heard.put)
        if here.node == 1:
            peers.done()
        if here.node == 2:
            time.sleep(0.3)
            peers.failed("rank 2 exited with code 7", 7)
        if here.node != 1:
            found = [heard.get(timeout=WITHIN)] if here.node == 0 else []
            time.sleep(0.2)
            return found + [heard.get() for _ in range(heard.qsize())]
        return [heard.get(timeout=WITHIN)]

    told = RemoteFailure(f"node 2 ({HOST}): rank 2 exited with code 7", 7)
    assert together(3, run)[:2] == [[told], [told]]


LAST = " iteration 4/ 4 | elapsed time per iteration (ms): 1.0 | lm loss: {} | grad norm: {} |"
PRINTS = "import os\nif os.environ['RANK'] == '1':\n    print({!r})\n"


@pytest.mark.parametrize(("numbers", "count"), [(("nan", "nan"), 1), (("2.0", "1.0"), 0)])
def test_a_node_without_the_lines_of_steps_knows_that_they_are_nan(
    numbers: tuple[str, str], count: int, gpus: SetGpus, tmp_path: Path
) -> None:
    """Its launcher called the run finished, and left the checkpoints that it alone puts away."""
    gpus(1)
    (script := tmp_path / "program.py").write_text(PRINTS.format(LAST.format(*numbers)))
    with nodes([str(script)], 1, 1) as (first, other):
        pass
    assert (first.code, other.code) == (0, 0)
    said = f"runner: {DIVERGED.format(4)}\n"
    assert (first.output.count(said), other.output.count(said)) == (count, 0)


def test_all_nodes_hear_from_one_where_numbers_were_nan() -> None:
    def run(here: Rendezvous) -> int:
        return PeerNodes(here, print).done(7 if here.node == 2 else 0)

    assert together(3, run) == [7, 7, 7]


def test_a_node_that_reports_no_numbers_is_done_all_the_same() -> None:
    """An older launcher's, which LAUNCHER_NODES_MAY_DIFFER allows, was lost, and ended others."""

    def run(here: Rendezvous) -> tuple[int, list[RemoteFailure]]:
        if here.node:
            here.links[0].send(failed=None)
            return 0, []
        heard: list[RemoteFailure] = []
        return PeerNodes(here, heard.append).done(), heard

    assert together(2, run) == [(0, [])] * 2


STEP_LINES = {
    "lm loss: nan | grad norm: nan |": 3,
    "lm loss: 2.0E+00 | loss scale: 1.0 | grad norm: inf | number of skipped iterations: 1 |": 0,
    "lm loss: 2.0 | grad norm: nan | number of skipped iterations: 0 |": 3,
    "grad norm: nan | number of skipped iterations: 0 | number of nan iterations: 1 |": 3,
    "lm loss: nan | grad norm: 0.5 | number of nan iterations: 0 |": 0,
    "lm loss: 2.0 | grad norm: 0.000 | number of nan iterations: 1 |": 0,
    "lm loss: inf | grad norm: 0.000 | number of nan iterations: 0 |": 3,
    "lm loss: 2.0 | mtp_1 loss: nan | number of nan iterations: 0 |": 3,
    "lm loss: 2.0 | mtp_1 loss: nan | number of nan iterations: 1 |": 3,  # the launcher had 0
    "learning rate: 1.0 | number of skipped iterations: 0 | number of nan iterations: 0 |": 3,
    "lm loss: nan | grad norm: nan | note: ... | version: 1.2.3 |": 3,  # which raised in the rank
}


@pytest.mark.parametrize("line", STEP_LINES)
def test_a_rank_judges_its_lines_as_the_launcher_does(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers of one run, of which one said failed and the other finished."""
    monkeypatch.setattr(builtins, "print", lambda *_: None)
    several = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    diverged.note(several, str(tmp_path))
    print(" iteration 1/ 9 | lm loss: nan |")  # no step's: it has no time
    assert not diverged.noted(str(tmp_path))
    head = "/ 9 | elapsed time per iteration (ms): 1.0 | "
    for text in (
        "iteration 2" + head + "lm loss: 2.0 | grad norm: 1.0 |",
        f"iteration 3{head}{line}",
    ):
        print(f" [2026-11-28 01:02:03] {text}")
    assert diverged.noted(str(tmp_path)) == STEP_LINES[line]


def test_enough_nodes_are_numbered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five with room for two or four, three came: the third one is over."""
    monkeypatch.setattr(rendezvous, "LAST_CALL_SECONDS", 0.5)
    port, said = free_port(), list[str]()

    def one(node: int) -> object:
        here = Rendezvous(node, 5, "127.0.0.1", port, said.append, fewer=(2, 4))
        try:
            here.join(20)
            return here.node, here.nodes, here.exchange(node, list)
        except NodeNotNeeded as unneeded:
            return str(unneeded)
        finally:
            here.close()

    with ThreadPoolExecutor() as pool:
        found = [*pool.map(one, (0, 2, 4))]
    assert found[:2] == [(0, 2, [0, 2]), (1, 2, [0, 2])]
    assert found[2] == "the run goes on with 2 nodes, and this one is over"
    assert said == [f"going on with 2 of 5 nodes: node 1, 3 didn't come to 127.0.0.1:{port}"]


CUT = """\
import sys, time
from launcher.agent.ranks.peers import PeerNodes
from launcher.agent.ranks.rendezvous import Rendezvous
node = int(sys.argv[1])
here = Rendezvous(node, 2, sys.argv[2], 29501, print)
here.join(20)
PeerNodes(here, lambda elsewhere: print(elsewhere.why, flush=True))
print("met", flush=True)
time.sleep(60)
"""


def test_a_machine_that_goes_is_missed_within_the_time_out(machines: list[str]) -> None:
    """No word comes of it, nor an end of the link: the kernel has to ask."""
    several = []
    for node, machine in enumerate(machines):
        line = ["ip", "netns", "exec", machine, sys.executable, "-c", CUT, str(node), FIRST]
        several.append(subprocess.Popen(line, env=environment(), stdout=subprocess.PIPE, text=True))
    try:
        for process in several:
            assert process.stdout
            assert process.stdout.readline() == "met\n"
        start = time.monotonic()
        ip(f"-n {machines[1]} link set cable down")
        for process in several:
            assert process.stdout
            assert re.search("^node [01] .+ has gone: ", process.stdout.readline())
        assert time.monotonic() - start < 120
    finally:
        for process in several:
            process.kill()
            process.wait()
