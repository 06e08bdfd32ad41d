"""Flight records: read in the shapes that torch writes them, and compared between ranks."""

from __future__ import annotations

import os
import pickle
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.stall import flight

from .conftest import start


def entry(number: int, name: str = "nccl:all_reduce", state: str = "completed", **more: Any) -> Any:
    """One entry as torch 2.5 and later have it."""
    frames = [
        {"name": "all_reduce", "filename": "/x/dist-packages/torch/distributed/c.py", "line": 9},
        {"name": "step", "filename": "/home/me/mine.py", "line": 12},
    ]
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "op_id": number,
        "profiling_name": name,
        "input_sizes": [[4, 8]],
        "output_sizes": [[4, 8]],
        "state": state,
        "retired": state == "completed",
        "is_p2p": False,
        **more,
    }


def record(*entries: Any) -> bytes:
    return pickle.dumps({"version": "2.4", "pg_config": {}, "entries": list(entries)}, protocol=2)


def test_entries_are_read() -> None:
    """torch 2.3 had one number for both kinds, and no group's description; sends count apart."""
    old = {"pg_id": 3, "seq_id": 5, "profiling_name": "nccl:_all_gather_base", "state": "scheduled"}
    sent = entry(2, "nccl:send 0->1", "started", p2p_seq_id=40, is_p2p=True)
    new, older, send = operations = flight.read(record(entry(7, state="started"), old, sent))
    assert new == flight.Operation(
        "0", "default_pg", 7, "all_reduce", "started", "[[4, 8]]", False, "mine.py:12"
    )
    assert older.told == "_all_gather_base 5 of group 3"
    assert (older.state, older.caller) == ("scheduled", "")
    assert (send.number, send.point_to_point) == (40, True)
    assert flight.last(operations) == {"0": new, "3": older}
    (retired,) = flight.read(record(entry(8, state="scheduled", retired=True)))
    assert retired.state == "completed"


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (Evil.folder,)

    folder = ""


def test_a_record_runs_nothing(tmp_path: Path) -> None:
    Evil.folder = str(tmp_path / "made")
    assert flight.read(pickle.dumps({"entries": [Evil()]})) == []
    assert not (tmp_path / "made").exists()


@given(st.integers(0, 2000))
def test_a_cut_record_is_none(length: int) -> None:
    whole = record(entry(1), entry(2))
    assert len(flight.read(whole[:length])) == (2 if length >= len(whole) else 0)


def operations(*numbers: int, group: str = "0", state: str = "completed") -> list[flight.Operation]:
    """all_reduces with those numbers, the last in that state."""
    states = ["completed"] * (len(numbers) - 1) + [state]
    return [
        flight.Operation(group, f"group-{group}", number, "all_reduce", now, "[[8]]", False, "")
        for number, now in zip(numbers, states, strict=True)
    ]


def test_who_is_behind_or_elsewhere_is_told() -> None:
    at_2, at_3 = operations(1, 2), operations(1, 2, 3, state="started")
    (late,) = flight.behind({0: at_3, 1: at_2, 2: operations(1, 2, 3, state="scheduled")})
    assert (late.rank, late.waiting) == (1, (0, 2))
    assert late.told == "hasn't come to all_reduce 3 of group group-0, where its last is number 2"
    other = [*at_2, flight.Operation("0", "group-0", 3, "barrier", "started", "", False, "")]
    (late,) = flight.behind({0: at_3, 1: other, 2: at_3})
    assert (late.rank, late.told) == (
        1,
        "has barrier 3 of group group-0 where others have all_reduce 3 of group group-0 [[8]]",
    )
    assert flight.behind({0: at_3, 1: other}) == []  # nobody can say which one is wrong


def test_nobody_is_behind_where_all_is_done() -> None:
    assert flight.behind({0: operations(1, 2), 1: operations(1)}) == []
    assert flight.behind({}) == flight.behind({0: []}) == []


def test_one_that_waits_itself_in_another_group_is_left_out() -> None:
    """Ranks meet in pairs, then in halves; 1 hangs, and 3 comes to no third pair because of it."""
    going, waiting = partial(operations, 1, 2), partial(operations, state="started")
    late = flight.behind(
        {
            0: [*waiting(1, 2, 3, group="pair-0"), *going(group="half-0")],
            1: [*going(group="pair-0"), *operations(1, group="half-1")],
            2: [*waiting(1, 2, 3, group="pair-1"), *going(group="half-0")],
            3: [*going(group="pair-1"), *waiting(1, 2, group="half-1")],
        }
    )
    assert {(behind.rank, behind.waiting) for behind in late} == {(1, (0,)), (1, (3,))}


@pytest.mark.parametrize(
    ("torch", "set_here"),
    [("2.3.0a0+ebedce2", True), ("2.5.1", True), ("2.6.0", False), ("2.11.0+cu130", False)],
)
def test_variables(monkeypatch: pytest.MonkeyPatch, torch: str, set_here: bool) -> None:
    """A torch that keeps records isn't told to; the user's own values win."""
    monkeypatch.setattr(metadata, "version", lambda name: {"torch": torch}[name])
    own = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine/rank-"}
    given = flight.variables(Path("/ranks"), own)
    assert given.pop("TORCH_NCCL_TRACE_BUFFER_SIZE", "") == ("2000" if set_here else "")
    assert given == own | {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": "/ranks/pipe-",
    }


def test_a_listening_rank_is_asked_through_its_pipe(tmp_path: Path) -> None:
    wanted = flight.variables(tmp_path, {})
    assert flight.ask(wanted, 5) is None
    os.mkfifo(tmp_path / "pipe-5.pipe")
    assert flight.ask(wanted, 5) is None  # as long as nobody reads
    reader = os.open(tmp_path / "pipe-5.pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "nccl-5").write_bytes(b"an earlier one")
    assert flight.ask(wanted, 5) == tmp_path / "nccl-5"
    assert not (tmp_path / "nccl-5").exists()
    assert os.read(reader, 8) == b"1"
    os.close(reader)


RECORDED = """\
import sys, torch, torch.distributed as dist
from pathlib import Path
dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0?rank=0&world_size=1")
if dump:
    dist.all_reduce(torch.ones(3))
    Path(sys.argv[1]).write_bytes(dump())
"""


@pytest.mark.megatron
def test_what_torch_itself_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo keeps records from torch 2.8 on, by the code that NCCL's are kept by."""
    script, written = tmp_path / "mine.py", tmp_path / "written"
    script.write_text(RECORDED)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    done = start(1, str(script), str(written))
    assert done.code == 0, done.output
    (operation,) = flight.read(written.read_bytes())
    assert operation.told == "all_reduce 1 of group default_pg"
    assert operation.sizes == "[[3]]"
    assert operation.state in ("scheduled", "completed")  # it is retired a little later
    assert operation.caller == "mine.py:6"
