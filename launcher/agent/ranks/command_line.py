"""The runner's command line: the ranks of a node, the variables of each, and what is refused."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread

from launcher.agent import start
from launcher.agent.ranks import devices
from launcher.agent.words import NEEDS, say

GPT = ("-m", "launcher.trainer.gpt")

LONGEST_VARIABLE = 128 * 1024
"""Bytes of a variable that the kernel passes on, with its name and an end (MAX_ARG_STRLEN)."""


class RunnerRefusal(Exception):
    """The ranks can't be started as asked; the text says why and how to mend it."""

    code = 2


class MismatchError(RunnerRefusal):
    """What is there doesn't fit: too few GPUs, too old ones, or another run's checkpoints."""

    code = 121


class NodesUnreachable(RunnerRefusal):
    """The other nodes can't be met now; another time they may."""

    code = 1


class NodeIsSpare(RunnerRefusal):
    """The others are as many as are wanted: this one ends as it should."""

    code = 0


@dataclass(frozen=True)
class NodeRanks:
    """The ranks of one node, and where they meet those of the other nodes."""

    program: tuple[str, ...]
    processes: int
    nodes: int
    fewer: tuple[int, ...]
    node_rank: int
    master_addr: str
    master_port: int
    cpu: bool
    grace: float
    keep: int | None
    checkpoints: Path | None
    secrets: Path
    checkout: str | None
    profile: Path | None
    nsys: Sequence[int]
    tie: bool
    wanted: int = 0

    def rank(self, local_rank: int) -> int:
        """The rank among all nodes; every node has the same number of processes."""
        return self.node_rank * self.processes + local_rank

    def traces(self, local_rank: int) -> bool:
        """Whether a rank runs under nsys."""
        return self.profile is not None and self.rank(local_rank) in self.nsys

    def tracer(self, local_rank: int) -> tuple[str, ...]:
        """Begins a rank's command for nsys to trace what it asks CUDA's profiler for.

        As Megatron's help of --profile has it, but that the rank goes on when the steps are over.
        nsys passes SIGTERM on and ends before the rank has: that is for the rank's own process.
        """
        return (
            *(shutil.which("nsys") or "nsys", "profile", "--trace=cuda,nvtx", "--sample=none"),
            *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
            *("--force-overwrite=true", f"--output={self.profile}/rank-{self.rank(local_rank)}"),
        )

    def check_devices(self) -> int:
        """How many CUDA devices are visible: one for each process, each able to run torch's code.

        Else raises `MismatchError`: upstream's quickstart would wait for the other devices' ranks.
        """
        try:
            found, arch_list = devices.look()
        except RuntimeError as error:
            raise MismatchError(f"CUDA can't be started: {error}") from None
        visible = len(found)
        if visible == 0:
            raise MismatchError("no CUDA device is visible: give --cpu to run on the CPU")
        if visible != self.processes:
            raise MismatchError(
                f"{self.processes} processes on {visible} visible CUDA devices: make them equal, "
                f"by --processes-per-node {visible} or by CUDA_VISIBLE_DEVICES"
            )
        if problem := devices.problem(found, arch_list):
            raise MismatchError(problem)
        return visible

    def check_packages(self, environ: Mapping[str, str]) -> None:
        """Raise `MismatchError` where this Python lacks what each rank would end for."""
        wanted = {"torch": "another image, or another Python by image.python"}
        if self.program[:2] == GPT and not self.checkout:
            wanted["megatron.core"] = "an image that has it, or --source PATH, a checkout"
        says = {name: f"take {instead}" for name, instead in wanted.items()}
        for name, why in (says | json.loads(environ.get(NEEDS, "{}"))).items():
            try:
                found = importlib.util.find_spec(name)
            except ModuleNotFoundError:  # nor the package that it is in
                found = None
            if found is None:
                raise MismatchError(f"{sys.executable} has no {name}: {why}")

    def command(self) -> list[str]:
        """What each rank runs: this Python, unbuffered so that logs don't lag."""
        redirection = ["-m", "launcher.agent.cpu"] if self.cpu else []
        checkout = ["-m", "launcher.agent.checkout", self.checkout] if self.checkout else []
        telling = [start.__file__, "ranks.stacks"]
        return [sys.executable, "-u", *telling, *redirection, *checkout, *self.program]

    def environment(self, local_rank: int, environ: Mapping[str, str], cpus: int) -> dict[str, str]:
        """The variables that `local_rank` gets on top of the runner's own."""
        ranks = {
            "RANK": self.rank(local_rank),
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.nodes * self.processes,
            "LOCAL_WORLD_SIZE": self.processes,
            "NODE_RANK": self.node_rank,
            "GROUP_RANK": self.node_rank,
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": self.master_port,
        }
        defaults: dict[str, object] = {
            "OMP_NUM_THREADS": max(1, min(8, cpus // self.processes)),
            # Megatron overlaps communication by launch order, which one queue preserves.
            "CUDA_DEVICE_MAX_CONNECTIONS": 1,
            # Where NCCL fails, only its own lines say why.
            "NCCL_DEBUG": "WARN",
        }
        if self.cpu and self.nodes == 1:
            # Without a network, gloo's look-up of the host name fails, and torch warns of its own.
            defaults |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        kept = {name: environ.get(name, value) for name, value in defaults.items()}
        return {name: str(value) for name, value in {**ranks, **kept}.items()}


class DeviceCheck(Thread):
    """Runs `check_devices` beside the ranks' start; `refuse` is called where GPUs are `unfit`."""

    def __init__(self, ranks: NodeRanks, refuse: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self.ranks, self.refuse, self.unfit = ranks, refuse, ""
        self.start()

    def run(self) -> None:
        try:
            self.ranks.check_devices()
        except MismatchError as found:
            self.unfit = str(found)
            self.refuse(self.unfit)


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python3 -m launcher.agent.runner",
        usage="%(prog)s --processes-per-node N [options] -- PROGRAM [ARGS ...]",
        description="PROGRAM is a script's path or -m MODULE. Exit code: the first failing "
        "rank's (128 + S when signal S killed it), 0 when all succeed, 2 or, for what is there, "
        "GPUs and checkpoints, 121 when refused.",
    )
    add = parser.add_argument
    here = "ranks to start on this node"
    add("--processes-per-node", type=int, dest="processes", metavar="N", required=True, help=here)
    add("--nodes", type=int, default=environ.get("PET_NNODES", "1"))
    add("--fewer", type=_numbers, default=(), help="how many will do, where some don't come: 2,3")
    add("--wanted", type=int, default=0, help="how many that are fit take part: others are spare")
    add("--node-rank", type=int, default=environ.get("PET_NODE_RANK", "0"))
    add("--master-addr", default=environ.get("PET_MASTER_ADDR", ""), help="where rank 0 listens")
    add("--master-port", type=int, default=environ.get("PET_MASTER_PORT", "0"))
    add("--cpu", action="store_true", help="run CUDA calls on the CPU, over gloo")
    add("--grace", type=float, default=600.0, help="seconds between a signal and the kill")
    add("--keep", type=int, help="the newest N complete checkpoints, and remove older ones")
    add("--checkpoints", type=Path, help="the folder of those")
    add("--secrets", type=Path, default="/run/secrets", help="files that become variables")
    add("--checkout", help="a Megatron-LM folder, first on PYTHONPATH, to run with")
    add("--profile", type=Path, help="a folder for traces, whose costs are printed at the end")
    add("--nsys", type=int, nargs="+", default=(), metavar="RANK", help="ranks to run under nsys")
    add("--tie", action="store_true", help="stop when standard input ends")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> NodeRanks:
    """The ranks of `argv`; `environ` has defaults. Raises `RunnerRefusal` where values clash."""
    end = argv.index("--") if "--" in argv else len(argv)
    ranks = NodeRanks(tuple(argv[end + 1 :]), **vars(_parser(environ).parse_args(argv[:end])))
    if ranks.program in ((), ("-m",)):
        raise RunnerRefusal("no program to run: give a script or -m MODULE after --")
    if ranks.processes < 1 or ranks.nodes < 1:
        raise RunnerRefusal("--processes-per-node and --nodes must be at least 1")
    if not 0 <= ranks.node_rank < ranks.nodes:
        raise RunnerRefusal(f"--node-rank {ranks.node_rank} is not in 0..{ranks.nodes - 1}")
    if ranks.nodes > 1 and not (ranks.master_addr and ranks.master_port):
        raise RunnerRefusal("with several nodes, give --master-addr and --master-port of node 0")
    if (ranks.keep is None) != (ranks.checkpoints is None):
        raise RunnerRefusal("--keep and --checkpoints go together")
    if ranks.keep is not None and ranks.keep < 1:
        raise RunnerRefusal("--keep must be at least 1")
    fewer = range(ranks.wanted, ranks.nodes) if ranks.wanted else ranks.fewer
    return replace(
        ranks,
        fewer=tuple(number for number in fewer if 0 < number < ranks.nodes),
        master_addr=ranks.master_addr or "127.0.0.1",
        master_port=ranks.master_port or free_port(),
    )


HELD = list[socket.socket]()
"""Sockets of ports that nobody else is given while this process lives."""


def free_port() -> int:
    """A port of this machine that nobody listens on, and the system gives to nobody else.

    Whoever sets SO_REUSEADDR, as torch's store does, can listen there.
    """
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # afterwards: it alone had it
    HELD.append(holder)
    port: int = holder.getsockname()[1]
    return port


def read_secrets(folder: Path) -> dict[str, str]:
    """Variables from the files in a folder, by their names; one newline at the end is left out.

    Files whose names can't be a variable's are left alone; a folder that isn't there has none.
    One that can't be passed on as a variable is named, and stays a file.
    """
    variables = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", path.name) or not path.is_file():
            continue
        try:
            content = path.read_bytes().removesuffix(b"\n")
        except OSError as error:
            say(f"{path} is no variable: {error.strerror}")
            continue
        if b"\0" in content or len(path.name) + len(content) + 2 > LONGEST_VARIABLE:
            say(f"{path} is no variable: it is binary, or longer than 128 KiB")
            continue
        variables[path.name] = os.fsdecode(content)
    return variables
