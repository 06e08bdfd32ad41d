"""The all-reduce's own arithmetic, and a real one over gloo."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent import allreduce
from tests.agent.conftest import start


@pytest.mark.parametrize(("ranks", "bus"), [(1, 0.0), (2, 10.0), (4, 15.0), (8, 17.5)])
def test_bus_bandwidth_is_that_of_nccl_tests(ranks: int, bus: float) -> None:
    """A gigabyte in a tenth of a second: 10 GB/s, times 2 (n - 1) / n."""
    told = allreduce.measured(10**9, "fp32", ranks, 0.1, right=True)
    assert (told["algorithm_gb_s"], told["bus_gb_s"]) == pytest.approx((10, bus))


def test_a_line_stands_under_its_heading() -> None:
    line = allreduce.row(allreduce.measured(16 * 10**6, "bf16", 2, 0.0005, right=False))
    assert line == "    16   bf16     0.500    32.00    32.00  WRONG"
    assert len(line.removesuffix("WRONG")) == len(allreduce.HEADING.removesuffix("sums"))


@given(ranks=st.integers(1, 85))
def test_sums_are_exact_in_bf16_and_a_rank_left_out_is_seen(ranks: int) -> None:
    """Whole numbers up to 256 are: 8 bits of significand. Whichever is, some sum is another."""
    sums = [allreduce.expected(ranks, place) for place in range(4)]
    assert 0 <= min(sums) <= max(sums) <= 256
    for absent in range(ranks):
        assert [total - (place + absent) % 4 for place, total in enumerate(sums)] != sums


def test_pairs_are_told_with_those_that_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch: 0 and 1 reach each other; what 1 sends to 2 arrives changed."""
    direct = {(0, 1), (1, 0)}
    torch = SimpleNamespace(
        cuda=SimpleNamespace(can_device_access_peer=lambda a, b: (a, b) in direct)
    )
    monkeypatch.setattr(allreduce, "copies_arrive", lambda torch, a, b: (a, b) != (1, 2))
    table, broken = allreduce.pairs(torch, 3)
    assert table[1] == ["yes", "-", "BAD"]
    assert allreduce.lines(table) == [
        "      0   1   2",
        "  0   - yes  no",
        "  1 yes   - BAD",
        "  2  no  no   -",
    ]
    assert broken == ["GPU 1 to 2: what is copied arrives changed"]


WRONG = """
import sys, torch.distributed
real = torch.distributed.all_reduce
def changed(tensor, *args, **kwargs):
    real(tensor, *args, **kwargs)
    if tensor.numel() > 2:
        tensor[tensor.numel() // 2] += 1
torch.distributed.all_reduce = changed
from launcher.agent import allreduce
sys.exit(allreduce.main(sys.argv[1:]))
"""


@pytest.mark.megatron
def test_wrong_sums_are_told_also_as_json_and_end_with_1(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(WRONG)
    run = start(2, str(script), "--largest", "1", "--json")
    assert (run.code, "alg GB/s" in run.output) == (1, False), run.output
    assert "allreduce: all-reduce of 1 MB bf16: wrong sums" in run.output
    told = json.loads(run.output[run.output.index("{") : run.output.rindex("}") + 1])
    assert told["title"].startswith("2 ranks, each on a CPU")
    assert (told["direct"], len(told["wrong"])) == ([], 2)
    sizes = [(size["megabytes"], size["type"], size["right"]) for size in told["sizes"]]
    assert sizes == [(1, "fp32", False), (1, "bf16", False)]
    assert all(size["seconds"] > 0 and size["bus_gb_s"] > 0 for size in told["sizes"])
