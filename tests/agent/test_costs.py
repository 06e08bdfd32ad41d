"""What a trace's time went to: families by names, gaps, communication; real traces on the CPU."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import costs, traces
from tests.tables import table

from .conftest import Run, going_on, runner_command

Trained = Callable[..., Run]


@table("family", "names")
def test_kernels_and_operators_have_families(family: str, names: list[str]) -> None:
    assert {name: costs.family(name) for name in names} == dict.fromkeys(names, family)


def event(cat: str, name: str, start: float, length: float, tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": tid, "ts": start, "dur": length}


ON_A_GPU = [
    {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    event("user_annotation", "ProfilerStep#10", 0, 1000),
    event("user_annotation", "ProfilerStep#11", 1000, 1000),
    event("cpu_op", "aten::mm", 10, 900),  # the host's time isn't the GPU's
    event("kernel", "nvjet_tst_64x8_TNT", 100, 900),
    event("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 800, 400, tid=20),
    event("kernel", "flash_fwd_kernel", 1300, 200),
    event("kernel", "nvjet_tst_64x8_TNT", 1400, 200, tid=8),  # half of it beside the one before
    {"ph": "i", "name": "Record Window End", "ts": 1900},
]


def text(events: list[dict[str, Any]]) -> str:
    """A trace as Kineto lays it out."""
    listed = ",\n  ".join(json.dumps(one, indent=4) for one in events)
    return f'{{\n "schemaVersion": 1,\n\n  "traceEvents": [\n  {listed}\n ],\n "traceName": "a"}}'


def test_time_is_told_once_whatever_goes_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "CHUNK", 37)  # so that no piece has an event whole
    found = costs.costs(costs.events(io.StringIO(text(ON_A_GPU))))
    told = {cost.family: (cost.ms, cost.share) for cost in found.costs}
    assert told == {
        "matrix products": (pytest.approx(0.5), pytest.approx(0.5)),
        "attention": (pytest.approx(0.1), pytest.approx(0.1)),
        "communication": (pytest.approx(0.1), pytest.approx(0.1)),  # 200 of 400 µs are alone
        "waiting for the host": (pytest.approx(0.3), pytest.approx(0.3)),
    }
    assert str(found) == (
        "2 steps of 1.0 ms: matrix products 50 %, waiting for the host 30 %, attention 10 %, "
        "communication 10 %; 0.1 ms of communication beside them"
    )


def test_of_a_gpu_that_lags_behind_its_steps_its_own_time_is_told() -> None:
    late = [*ON_A_GPU, event("kernel", "nvjet_tst_64x8_TNT", 1900, 300)]
    found = costs.costs(late)
    assert found.ms == pytest.approx(1.05)  # from 100 to 2200 µs, over two steps


def test_an_operator_is_told_without_those_that_it_calls() -> None:
    nested = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("cpu_op", "aten::linear", 0, 60),
        event("cpu_op", "aten::add_", 10, 20),
        event("cpu_op", "aten::gelu", 60, 10),
        event("cpu_op", "aten::mm", 0, 10, tid=9),  # the thread of the backward pass
    ]
    told = {cost.family: round(cost.share, 6) for cost in costs.costs(nested).costs}
    outside = costs.PYTHON
    assert told == {"matrix products": 0.5, "elementwise": 0.2, "activations": 0.1, outside: 0.2}


@pytest.mark.parametrize("left", [10, 300, -30])
def test_a_trace_that_was_cut_off_is_none(left: int) -> None:
    cut = io.StringIO(text(ON_A_GPU)[:left])
    with pytest.raises(ValueError, match="whole"):
        costs.costs(costs.events(cut))


@pytest.mark.megatron
def test_a_run_writes_a_trace_of_its_steps_and_names_five_costs(
    train: Trained, tmp_path: Path
) -> None:
    found = traces.Traces(tmp_path)
    train(2, "--profile-steps", "3", "5", "--profile-dir", str(tmp_path))
    (line,) = found.told({0: 1, 1: 2})
    assert line.startswith("profile of rank 0: 3 steps of ")
    words = line.partition("CPU: ")[2].partition(", the rest")[0]
    assert words.count(" %") == 5
    trace = json.loads(gzip.decompress((tmp_path / "rank-0.json.gz").read_bytes()))
    names = {one["name"] for one in trace["traceEvents"]}
    assert {f"ProfilerStep#{number}" for number in (3, 4, 5)} <= names
    assert not {"ProfilerStep#2", "ProfilerStep#6"} & names
    kept = json.loads((tmp_path / "rank-0.costs.json").read_text())
    assert kept["words"] in line
    assert {"matrix products", "norms", "communication"} <= {one["family"] for one in kept["costs"]}
    assert sum(cost["share"] for cost in kept["costs"]) == pytest.approx(1)
    assert {path.name for path in tmp_path.iterdir()} == {"rank-0.json.gz", "rank-0.costs.json"}


# A stand-in for Megatron's own loop, as in 0.9 to 0.16: the profiler is torch's.
UPSTREAM = """
import sys, torch
folder, begin, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
prof = torch.profiler.profile(
    schedule=torch.profiler.schedule(
        wait=max(begin - 1, 0), warmup=1, active=end - begin, repeat=1),
    on_trace_ready=torch.profiler.tensorboard_trace_handler(folder),
    record_shapes=True, with_stack=True)
prof.start()
for iteration in range(6):
    prof.step()
    with torch.profiler.record_function(f"iteration {iteration + 1}"):
        torch.ones(64, 64) @ torch.ones(64, 64)
    if iteration + 1 == end:
        prof.stop()
"""


@pytest.mark.megatron
def test_megatrons_traces_are_put_in_their_place(tmp_path: Path) -> None:
    """Also pins which steps Megatron's options stand for, as plan/render.py has it."""
    script, folder = tmp_path / "train.py", tmp_path / "profile"
    script.write_text(UPSTREAM)
    folder.mkdir()
    program = [str(script), str(folder / "tensorboard"), "3", "5"]
    with going_on(runner_command(1, *program, options=["--profile", str(folder)])) as run:
        pass
    assert "runner: profile of rank 0: 2 steps of " in run.output, run.output
    assert list(folder.rglob("*.pt.trace.json")) == []
    with gzip.open(folder / "rank-0.json.gz", "rt") as file:
        names = {one["name"] for one in costs.events(file)}
    assert {name for name in names if name.startswith("iteration ")} == {
        "iteration 3",
        "iteration 4",
    }


def test_what_lay_there_before_and_what_is_cut_off_is_left(tmp_path: Path) -> None:
    old = tmp_path / "rank-0.json.gz"
    old.write_bytes(gzip.compress(text(ON_A_GPU).encode()))
    found = traces.Traces(tmp_path)
    new = tmp_path / "torch_profile/rank-1.json.gz"  # as Megatron 0.17 writes them
    cut = tmp_path / "tensorboard/host_44.171.pt.trace.json"
    for path in (new, cut):
        path.parent.mkdir()
    new.write_bytes(old.read_bytes())
    cut.write_text(text(ON_A_GPU)[:-40])
    lines = list(found.told({0: 42, 1: 43, 2: 44}))
    assert [line.partition(":")[0] for line in lines] == ["profile of rank 1", "profile of rank 2"]
    assert "isn't whole" in lines[1]
    assert cut.exists()
    assert (tmp_path / "rank-1.json.gz").exists()


@pytest.mark.megatron
def test_steps_that_lie_behind_are_told(train: Trained, tmp_path: Path) -> None:
    saved = ["--save", str(tmp_path / "ck"), "--train-iters", "4"]
    train(1, *saved)
    asked = ["--profile-steps", "3", "5", "--profile-dir", str(tmp_path)]
    run = train(1, "--load", str(tmp_path / "ck"), *asked)
    assert "gpt: step 3 lies behind: nothing is traced" in run.output
    assert not (tmp_path / "rank-0.json.gz").exists()
