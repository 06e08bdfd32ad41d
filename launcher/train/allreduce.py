"""All-reduce over the ranks' GPUs: are the sums right, which pairs reach each other, how fast."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Measured:
    """One size: seconds of the slowest rank for one all-reduce of `size` bytes on `ranks`."""

    size: int
    dtype: str
    ranks: int
    seconds: float
    right: bool

    @property
    def algorithm_bandwidth(self) -> float:
        """GB/s: the message's bytes by the time."""
        return self.size / self.seconds / 1e9

    @property
    def bus_bandwidth(self) -> float:
        """GB/s that each GPU's link carries, to be compared with what hardware can do.

        https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
        """
        return self.algorithm_bandwidth * 2 * (self.ranks - 1) / self.ranks

    def __str__(self) -> str:
        return (
            f"{self.size / MB:>6.0f} {self.dtype:>6} {self.seconds * 1e3:>9.3f} "
            f"{self.algorithm_bandwidth:>8.2f} {self.bus_bandwidth:>8.2f}  "
            + ("right" if self.right else "WRONG")
        )


HEADING = f"{'MB':>6} {'type':>6} {'ms':>9} {'alg GB/s':>8} {'bus GB/s':>8}  sums"


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


def measure(torch: Any, size: int, dtype: Any, group: Any) -> Measured:
    """One size on all ranks together, told by the slowest and by any with wrong sums."""
    right = sums_are_right(torch, size, dtype, group)
    told = torch.tensor([seconds(torch, size, dtype, group), float(not right)])
    torch.distributed.all_reduce(told, op=torch.distributed.ReduceOp.MAX)  # over gloo
    slowest, wrong = told.tolist()
    name = {"float32": "fp32", "bfloat16": "bf16"}[str(dtype).removeprefix("torch.")]
    return Measured(size, name, torch.distributed.get_world_size(), slowest, not wrong)


def copies_arrive(torch: Any, source: int, target: int) -> bool:
    """Whether what is copied from one GPU to another arrives as it was."""
    sent = torch.arange(PAIR_BYTES // 4, dtype=torch.int32, device=f"cuda:{source}")
    arrived = sent.to(f"cuda:{target}").cpu()
    return bool(torch.equal(arrived, torch.arange(PAIR_BYTES // 4, dtype=torch.int32)))


def pairs(torch: Any, devices: int) -> tuple[list[list[str]], list[str]]:
    """Which device (row) reaches which directly, and a line for each pair that is broken."""
    table, broken = [], []
    for source in range(devices):
        cells = []
        for target in range(devices):
            if source == target:
                cells.append("-")
                continue
            direct = torch.cuda.can_device_access_peer(source, target)
            arrives = copies_arrive(torch, source, target)
            cells.append("BAD" if not arrives else "yes" if direct else "no")
            if not arrives:
                broken.append(
                    f"GPU {source} to {target}: what is copied arrives changed"
                    + (", by direct access" if direct else "")
                )
        table.append(cells)
    return table, broken


def rows(table: list[list[str]]) -> list[str]:
    """The table of pairs in lines, with the devices' numbers before and above."""
    numbered = [["", *map(str, range(len(table)))]]
    numbered += [[str(number), *cells] for number, cells in enumerate(table)]
    return [" ".join(f"{cell:>3}" for cell in cells) for cells in numbered]


@dataclass
class Found:
    """What there is to tell: `direct` says which GPU (row) reaches which (column) directly."""

    title: str
    direct: list[list[str]] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def json(self) -> str:
        """All of it, as one JSON object."""
        sizes = [
            {
                "megabytes": one.size // MB,
                "type": one.dtype,
                "seconds": one.seconds,
                "algorithm_gb_s": one.algorithm_bandwidth,
                "bus_gb_s": one.bus_bandwidth,
                "right": one.right,
            }
            for one in self.measured
        ]
        told = {"title": self.title, "direct": self.direct, "sizes": sizes, "wrong": self.wrong}
        return json.dumps(told, indent=2)


def report(torch: Any, sizes: Sequence[int], group: Any, say: Callable[[str], None]) -> Found:
    """Say what is found, as it is found; what is wrong is the same on every rank."""
    found = Found(_title(torch))
    say(found.title)
    if not _on_cpu(torch):
        seen: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            found.direct, broken = pairs(torch, torch.cuda.device_count())
            say("direct access from GPU (row) to GPU (column):")
            for line in rows(found.direct):
                say(line)
            seen = [broken]
        torch.distributed.broadcast_object_list(seen)
        found.wrong += seen[0]
        if found.wrong:  # over a broken pair, an all-reduce may never end
            return found
    say(HEADING)
    for size in sizes:
        for dtype in (torch.float32, torch.bfloat16):
            measured = measure(torch, size, dtype, group)
            found.measured.append(measured)
            say(str(measured))
            if not measured.right:
                found.wrong.append(f"all-reduce of {size // MB} MB {measured.dtype}: wrong sums")
    return found


def _on_cpu(torch: Any) -> bool:
    from launcher.train import cpu

    return hasattr(torch.cuda, cpu.MARK)


def main(argv: Sequence[str]) -> int:
    """Report on rank 0; 1 where sums are wrong or a pair of GPUs is broken, else 0."""
    parser = argparse.ArgumentParser(prog="python3 -m launcher.train.allreduce")
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

    found = report(torch, [size * MB for size in SIZES if size <= args.largest], group, say)
    if rank == 0:
        for line in found.wrong:
            print(f"allreduce: {line}", file=sys.stderr, flush=True)
        if args.json:
            print(found.json(), flush=True)
    torch.distributed.destroy_process_group()
    return 1 if found.wrong else 0


def _title(torch: Any) -> str:
    ranks = torch.distributed.get_world_size()
    name = torch.cuda.get_device_name(torch.cuda.current_device())
    over = "gloo"
    if not _on_cpu(torch):
        over = "NCCL " + ".".join(map(str, torch.cuda.nccl.version()))
    return f"{ranks} ranks, each on a {name}; torch {torch.__version__}, {over}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
