"""Which rank the others wait for: by stacks as collectives leave them, and by real processes."""

from __future__ import annotations

import linecache
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launcher.agent.ranks import stacks
from launcher.agent.ranks.stacks import Frame, Stack
from launcher.agent.stall import flight, stall
from launcher.agent.stall.stall import Activity, RankPosition

from .conftest import start_rank
from .test_flight import entry, operations, record

TORCH = "/usr/local/lib/python3.10/dist-packages/torch"
C10D = f"{TORCH}/distributed/distributed_c10d.py"
GRADS = Frame("/opt/megatron/lib/megatron/core/distributed/finalize_model_grads.py", 270, "grads")
MINE = Frame("/home/me/mine.py", 12, "step")
LINES = {12: "time.sleep(3600)", 20: "work.wait()", 30: "loss = total.item()"}
P2P = "/m/megatron/core/p2p_communication.py"
for file, texts in {MINE.file: LINES, P2P: {7: "req.wait()"}}.items():
    lines = [f"{texts.get(number, '')}\n" for number in range(1, 40)]
    linecache.cache[file] = (1, None, lines, file)  # as if they were there


def at(*frames: Frame) -> RankPosition:
    return stall.place(frames)


def collective(name: str = "all_reduce", caller: Frame = GRADS) -> RankPosition:
    wrapper = Frame(f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper")
    return at(Frame(C10D, 2806, name), wrapper, caller, MINE)


SLEEPS = at(MINE)


def said(places: dict[int, RankPosition], *, whole: bool = True) -> str:
    return stall.conclude(places, {}, whole=whole)


@pytest.mark.parametrize(
    ("stack", "kind", "told"),
    [
        ((MINE,), Activity.ELSEWHERE, "step (mine.py:12): time.sleep(3600)"),
        (
            (Frame(C10D, 2806, "all_reduce"), GRADS, MINE),
            Activity.COLLECTIVE,
            "all_reduce (distributed_c10d.py:2806), from finalize_model_grads.py:270",
        ),
        (
            (Frame(C10D, 9, "broadcast"), Frame(C10D, 99, "broadcast_object_list"), MINE),
            Activity.COLLECTIVE,
            "broadcast_object_list (distributed_c10d.py:99), from mine.py:12",
        ),
        ((Frame(C10D, 9, "recv"), MINE), Activity.POINT_TO_POINT, None),
        ((Frame("/home/me/mine.py", 20, "step"),), Activity.COLLECTIVE, None),
        ((Frame(P2P, 7, "r"),), Activity.POINT_TO_POINT, None),
        ((Frame("/home/me/mine.py", 30, "step"),), Activity.DEVICE, None),
        ((Frame(f"{TORCH}/cuda/__init__.py", 3, "synchronize"), MINE), Activity.ELSEWHERE, None),
        (
            (Frame("/usr/lib/python3.10/selectors.py", 416, "select"), MINE),
            Activity.ELSEWHERE,
            "select (selectors.py:416), from mine.py:12: time.sleep(3600)",
        ),
        ((Frame(C10D, 1, "<module>"), MINE), Activity.ELSEWHERE, None),  # torch is being imported
        ((Frame("/home/me/event.py", 20, "f"), MINE), Activity.ELSEWHERE, "f (event.py:20)"),
        ((), Activity.ELSEWHERE, "no Python function"),
    ],
)
def test_where_a_rank_is(stack: Stack, kind: Activity, told: str | None) -> None:
    found = stall.place(stack)
    assert found.kind is kind
    assert told in (None, found.told)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_the_odd_one_out_is_the_one(odd: int) -> None:
    """In another collective than all others, or the only one that waits for a single rank."""
    told = said(dict.fromkeys(range(3), collective()) | {odd: collective("barrier", MINE)})
    assert told.startswith(f"rank {odd} alone waits in barrier (distributed_c10d.py:2806), from mi")
    alone = at(Frame(C10D, 9, "recv"), MINE)
    told = said({n: collective(name) for n, name in enumerate("abc")} | {odd: alone})
    assert told.startswith(f"rank {odd} alone waits for one rank in recv (distributed_c10d.py:9)")


def test_where_no_one_rank_is_to_blame() -> None:
    assert said({0: collective(), 1: collective("barrier")}) == (
        "each rank waits for others: rank 0 waits in all_reduce, from finalize_model_grads.py:270, "
        "rank 1 waits in barrier, from finalize_model_grads.py:270"
    )
    places = {4: collective(), 5: collective()}
    assert said(places).endswith("all of them: a GPU or the network between them doesn't go on")
    assert said(places, whole=False).endswith("all of this node: look at the other nodes")
    assert said({0: SLEEPS, 1: SLEEPS}) == (
        "no rank waits for another: ranks 0, 1 are in step (mine.py:12): time.sleep(3600)"
    )


def test_records_tell_more_than_stacks() -> None:
    gpu = at(Frame("/home/me/mine.py", 30, "step"))
    places = {0: gpu, 1: gpu}
    records = {0: operations(1, 2, 3, state="started"), 1: operations(1, 2)}
    assert stall.conclude(places, records, whole=True) == (
        "rank 1 hasn't come to all_reduce 3 of group group-0, where its last is number 2 (waits "
        "for its GPU in step (mine.py:30): loss = total.item()), while rank 0 waits there"
    )


def test_a_rank_whose_gpu_has_a_collective_to_do_waits_for_it() -> None:
    records = {0: operations(57, state="scheduled")}
    places = {0: SLEEPS, 1: collective("barrier", MINE)}
    assert stall.conclude(places, records, whole=True) == (
        "each rank waits for others: rank 0 waits for its GPU in step (mine.py:12): "
        "time.sleep(3600), all_reduce 57 of group group-0 isn't done, rank 1 waits in barrier, "
        "from mine.py:12"
    )
    done = {0: operations(57, state="completed")}
    assert stall.conclude(places, done, whole=True).startswith("rank 0 isn't in a collective")


FAKE_TORCH = """\
import time
def all_reduce():
    time.sleep(600)
"""


def in_collective(folder: Path) -> str:
    path = str(folder / "site-packages/torch/distributed")
    return f"sys.path.insert(0, {path!r}); import distributed_c10d; distributed_c10d.all_reduce()"


def test_real_processes_are_asked(tmp_path: Path, processes: list[subprocess.Popen[bytes]]) -> None:
    package = tmp_path / "site-packages/torch/distributed"
    package.mkdir(parents=True)
    (package / "distributed_c10d.py").write_text(FAKE_TORCH)
    ranks = processes
    collector = stall.Collector(tmp_path, {}, cpu=True, whole=True)
    for number, program in enumerate([in_collective(tmp_path), "time.sleep(600)"] * 2):
        ranks.append(start_rank(tmp_path, number, program))
    unready = subprocess.Popen(["sleep", "600"])  # the signal would end it
    ranks.append(unready)
    time.sleep(0.5)
    os.kill(ranks[3].pid, signal.SIGSTOP)
    asked = {number: process.pid for number, process in enumerate(ranks)}
    lines = collector.report(asked)
    assert lines[0].startswith("rank 0 waits in all_reduce (distributed_c10d.py:3), from program-0")
    assert lines[1].startswith("rank 1 is in hang (program-1.py:4): time.sleep(600)")
    assert lines[3] == "rank 3 doesn't answer: the kernel has it as T (stopped)"
    assert lines[4].startswith("rank 4 doesn't answer: it has just been started")
    assert lines[-1].startswith(f"{stall.CONCLUSION}rank 3 doesn't answer: the kernel")
    assert all(process.poll() is None for process in ranks)
    kept = tmp_path / "stalled-1"
    assert (kept / stall.REPORT).read_text().splitlines() == lines
    assert "in all_reduce" in stacks.path(kept, 2).read_text()
    os.kill(ranks[3].pid, signal.SIGCONT)
    time.sleep(0.5)
    again = collector.report(
        {n: asked[n] for n in range(3)}
    )  # what was written before isn't read again
    outside = "rank 1 isn't in a collective, but in function hang"
    assert again[-1].startswith(f"{stall.CONCLUSION}{outside}")
    assert "while rank 0 waits in all_reduce, from program-0.py" in again[-1]
    assert (tmp_path / "stalled-2").is_dir()


def test_who_is_no_runner_is_not_asked() -> None:
    assert stall.ask(os.getpid()) == {}


def test_records_of_a_time_out_say_who_was_missing(tmp_path: Path) -> None:
    collector = stall.Collector(tmp_path, {}, cpu=False, whole=True)
    assert collector.after_failure() == []
    (tmp_path / "nccl-0").write_bytes(record(entry(1), entry(2, state="started")))
    (tmp_path / "nccl-1").write_bytes(record(entry(1)))
    (tmp_path / "nccl-2").write_bytes(b"half a rec")
    assert collector.after_failure() == [
        "in short: rank 1 hasn't come to all_reduce 2 of group default_pg, where its last is "
        "number 1, while rank 0 waits there"
    ]
    assert stall.Collector(tmp_path, {}, cpu=True, whole=True).after_failure() == []


def test_on_gpus_ranks_keep_flight_records(tmp_path: Path) -> None:
    for cpu, records in ((False, flight.variables(tmp_path, {})), (True, {})):
        given = stall.Collector(tmp_path, {}, cpu=cpu, whole=True).variables
        assert given == {stacks.FOLDER: str(tmp_path), **records}
