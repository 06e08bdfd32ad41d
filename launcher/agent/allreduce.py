"""Runs all-reduce over the ranks' GPUs: checks sums and pairs, measures bandwidth."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.agent import cpu, words

MB = 1_000_000
SIZES = (1, 4, 16, 64, 256)
"""Sizes of a message, in MB of 10^6 bytes."""

WARM_UP = 3
ROUNDS = 10
PATTERN = 4
"""Elements count 0, 1, 2, 3, …, begun at the rank: their sums are whole numbers up to three times
the ranks, which bf16 holds exactly for up to 85 of them."""

PAIR_BYTES = 16 << 20
TIMEOUT = datetime.timedelta(minutes=2)

LEAST, MOST, GROWTH, ENOUGH, AGAIN = 1 << 20, 256 << 20, 4, 0.012, 5
"""Bytes of what is summed before the start, and how it grows until it takes so many seconds: all
sizes together take 0.1 s at most where the first doesn't take longer."""

HEADING = f"{'MB':>6} {'type':>6} {'ms':>9} {'alg GB/s':>8} {'bus GB/s':>8}  sums"


def measured(size: int, dtype: str, ranks: int, seconds: float, right: bool) -> dict[str, Any]:
    """The line to print for all-reduces of `size` bytes on `ranks` that took `seconds` each.

    The algorithm's GB/s are the message's bytes by the time, the bus's what each GPU's link
    carries: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    algorithm = size / seconds / 1e9
    return {
        "megabytes": size // MB,
        "type": dtype,
        "seconds": seconds,
        "algorithm_gb_s": algorithm,
        "bus_gb_s": algorithm * 2 * (ranks - 1) / ranks,
        "right": right,
    }


def row(told: Mapping[str, Any]) -> str:
    """The same as a line under HEADING."""
    return (
        f"{told['megabytes']:>6} {told['type']:>6} {told['seconds'] * 1e3:>9.3f} "
        f"{told['algorithm_gb_s']:>8.2f} {told['bus_gb_s']:>8.2f}  "
        + ("right" if told["right"] else "WRONG")
    )


def expected(ranks: int, place: int) -> int:
    """The sum at an index whose remainder by PATTERN is `place`."""
    return sum((place + rank) % PATTERN for rank in range(ranks))


def sums_are_right(torch: Any, size: int, dtype: Any, group: Any) -> bool:
    """Whether one all-reduce of `size` bytes gives every rank the sum of all."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    count = size // torch.finfo(dtype).bits * 8
    places = torch.arange(count, device="cuda") % PATTERN
    tensor = ((places + rank) % PATTERN).to(dtype)
    torch.distributed.all_reduce(tensor, group=group)
    wanted = torch.tensor([expected(ranks, place) for place in range(PATTERN)], device="cuda")
    return bool(torch.equal(tensor.to(torch.int64), wanted[places]))


def seconds(torch: Any, size: int, dtype: Any, group: Any) -> float:
    """This rank's mean time of one all-reduce of `size` bytes."""
    tensor = torch.zeros(size // torch.finfo(dtype).bits * 8, dtype=dtype, device="cuda")
    start = 0.0
    for number in range(WARM_UP + ROUNDS):
        if number == WARM_UP:
            torch.cuda.synchronize()
            start = time.perf_counter()
        torch.distributed.all_reduce(tensor, group=group)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / ROUNDS


def measure(torch: Any, size: int, dtype: Any, group: Any) -> dict[str, Any]:
    """One size on all ranks together, reported by the slowest and by any with wrong sums."""
    right = sums_are_right(torch, size, dtype, group)
    told = torch.tensor([seconds(torch, size, dtype, group), float(not right)])
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)  # over gloo
    slowest, wrong = told.tolist()
    name = "fp32" if dtype is torch.float32 else "bf16"
    return measured(size, name, torch.distributed.get_world_size(), slowest, not wrong)


def link_line(torch: Any, device: Any, nodes: int, group: Any = None) -> str:
    """The bus bandwidth of a group on so many nodes, as `words.LINK` reads it; all ranks call it.

    By the largest all-reduce that is short, the mean of AGAIN after one, by its slowest rank.
    """
    ranks, size = torch.distributed.get_world_size(group), LEAST
    name = "CPU" if device == "cpu" else torch.cuda.get_device_name()
    while True:
        sums = torch.zeros(size // 4, device=device)
        for rounds in (1, AGAIN):
            began = time.perf_counter()
            for _ in range(rounds):
                torch.distributed.all_reduce(sums, group=group)
            sums[0].item()  # which waits for them
            took = torch.full((1,), (time.perf_counter() - began) / rounds, device=device)
        torch.distributed.all_reduce(took, op=torch.distributed.ReduceOp.MAX, group=group)
        slowest = float(took.item())
        if size == MOST or slowest * GROWTH > ENOUGH:
            rate = measured(size, "fp32", ranks, slowest, right=True)["bus_gb_s"]
            return words.link(nodes, ranks // nodes, name, rate)
        size *= GROWTH


def copies_arrive(torch: Any, source: int, target: int) -> bool:
    """Whether what is copied from one GPU to another arrives as it was."""
    sent = torch.arange(PAIR_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
    arrived = sent.to(f"cuda:{target}").cpu()
    return bool(torch.equal(arrived, torch.arange(PAIR_BYTES // 4, dtype=torch.int32)))


def pairs(torch: Any, devices: int) -> tuple[list[list[str]], list[str]]:
    """Which device (row) reaches which directly, and a line for each pair that is broken."""
    table, broken = [], []
    for source in range(devices):
        cells = ["-"] * devices
        for target in (n for n in range(devices) if n != source):
            direct = torch.cuda.can_device_access_peer(source, target)
            cells[target] = "yes" if direct else "no"
            if not copies_arrive(torch, source, target):
                cells[target] = "BAD"
                by = ", by direct access" if direct else ""
                broken.append(f"GPU {source} to {target}: what is copied arrives changed{by}")
        table.append(cells)
    return table, broken


def lines(table: list[list[str]]) -> list[str]:
    """The table of pairs, with the devices' numbers before and above."""
    numbered = [["", *map(str, range(len(table)))]]
    numbered += [[str(number), *cells] for number, cells in enumerate(table)]
    return [" ".join(f"{cell:>3}" for cell in cells) for cells in numbered]


def report(torch: Any, sizes: Sequence[int], group: Any, say: Callable[[str], None]) -> Any:
    """Say what is found as it is found; all of it, for JSON, with what is wrong on any rank.

    `direct` says which GPU (row) reaches which (column) directly.
    """
    on_cpu = cpu.is_installed()
    name = torch.cuda.get_device_name(torch.cuda.current_device())
    over = "gloo" if on_cpu else "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    ranks = torch.distributed.get_world_size()
    title = f"{ranks} ranks, each on a {name}; torch {torch.__version__}, {over}"
    told: dict[str, Any] = {"title": title, "direct": [], "sizes": [], "wrong": []}
    say(title)
    if not on_cpu:
        broken: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            told["direct"], broken[0] = pairs(torch, torch.cuda.device_count())
            for line in ("direct access from GPU (row) to GPU (column):", *lines(told["direct"])):
                say(line)
        torch.distributed.broadcast_object_list(broken)
        told["wrong"] = broken[0]
        if told["wrong"]:  # over a broken pair, an all-reduce may never end
            return told
    say(HEADING)
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            of_size = measure(torch, size, dtype, group)
            told["sizes"].append(of_size)
            say(row(of_size))
            if not of_size["right"]:
                told["wrong"].append(f"all-reduce of {size // MB} MB {of_size['type']}: wrong sums")
    return told


def main(argv: Sequence[str]) -> int:
    """Report on rank 0; 1 where sums are wrong or a pair of GPUs is broken, else 0."""
    parser = argparse.ArgumentParser(prog="python3 -m launcher.agent.allreduce")
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="MB of the largest message")
    parser.add_argument("--json", action="store_true", help="print it as JSON, at the end")
    args = parser.parse_args(argv)
    if os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name need not be known
    import torch

    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    group = torch.distributed.new_group(backend="nccl", timeout=TIMEOUT)
    rank = torch.distributed.get_rank()

    def say(text: str) -> None:
        if rank == 0 and not args.json:
            print(text, flush=True)

    told = report(torch, [size * MB for size in SIZES if size <= args.largest], group, say)
    if rank == 0:
        for line in told["wrong"]:
            print(f"allreduce: {line}", file=sys.stderr, flush=True)
        if args.json:
            print(json.dumps(told, indent=2), flush=True)
    torch.distributed.destroy_process_group()
    return 1 if told["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
