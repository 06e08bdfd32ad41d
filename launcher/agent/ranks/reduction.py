"""Runs a short all-reduce over all nodes before their ranks start, and names a node that is slow.

A process on each does it, as a library that waits for another node can't be asked to give up. It
is a fork: torch is there already, and what it takes of a GPU goes with it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from threading import Lock, Thread
from typing import Any

from launcher.agent import allreduce, words
from launcher.agent.ranks.command_line import MismatchError, free_port
from launcher.agent.ranks.rank import end_with_parent
from launcher.agent.ranks.rendezvous import (
    MOST,
    ROUND_SECONDS,
    STEP_SECONDS,
    Rendezvous,
    StopWaiting,
)

ELEMENTS, SECONDS, EACH_SECONDS, LONGEST = 1 << 18, 30.0, 1 / 40, 45.0
"""Of 4 bytes; and how long their sums may take, the start of NCCL or gloo included: with more for
each node, as they find each other through the first one. It counts once all have loaded torch."""

LOADING_SECONDS = 300.0
"""In which each node loads torch: minutes where many read it from one file server at a time."""

LIMIT = "LAUNCHER_ALL_REDUCE_SECONDS"
"""Set, that long."""

BEAT_SECONDS, SILENT_SECONDS = 0.5, 3.0
"""How often a process says that it is there, and after how long it counts as held."""


def limit(nodes: int, environ: Mapping[str, str]) -> float:
    """Seconds that `nodes` have for their sums. Raises MismatchError where LIMIT is no number."""
    told = environ.get(LIMIT, "")
    if not re.fullmatch(r"|\d{1,6}(\.\d+)?", told, re.ASCII) or (told and not float(told)):
        raise MismatchError(f"{LIMIT}: {told!r} is no number of seconds above 0")
    return float(told or min(SECONDS + nodes * EACH_SECONDS, LONGEST))


def look(
    rendezvous: Rendezvous, variables: Mapping[str, str], *, cpu: bool, seconds: float
) -> list[dict[str, Any]]:
    """What became of it on each node in that time; all call it together.

    Raises RendezvousFailure, StopWaiting.

    why: why there is no sum, "" if there is; blamed: whether that is this node's own doing; host
    """
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()
    place = rendezvous.node, rendezvous.nodes, rendezvous.address, seconds
    process = fork.Process(target=_process, args=(theirs, place, variables, cpu, os.getpid()))
    process.start()
    theirs.close()
    try:
        loading, stopped = LOADING_SECONDS, rendezvous.stopped
        why, _ = _heard(process, ours, stopped, loading, "torch isn't loaded")
        blamed = bool(why)  # no other node takes part in that
        port = rendezvous.exchange(free_port(), lambda ports: ports[0], loading + ROUND_SECONDS)
        if not why:
            with suppress(OSError):  # of a process that has ended since
                ours.send(port)
            why, blamed = _heard(process, ours, stopped, seconds, "no sum")
    finally:
        process.kill()
        process.join()
    told = {"host": socket.gethostname(), "why": why, "blamed": blamed}
    found: list[dict[str, Any]] = rendezvous.exchange(told, list, seconds + ROUND_SECONDS)
    return found


def _heard(
    process: Any, pipe: Connection, stopped: Callable[[], object], seconds: float, late: str
) -> tuple[str, bool]:
    """Why it didn't get on, "" if it did, and whether it is to blame. Raises StopWaiting."""
    start = beat = time.monotonic()
    while (now := time.monotonic()) < start + seconds:
        if stopped():
            raise StopWaiting
        wait([pipe, process.sentinel], STEP_SECONDS)
        with suppress(EOFError, ConnectionResetError):  # the latter with a port that it hadn't read
            if pipe.poll():
                said: str | None = pipe.recv()
                if said is not None:
                    return said, False
                beat = now
                continue
        if not process.is_alive():
            return "its process was killed", True
    if now - beat > SILENT_SECONDS:
        return f"its process is held, and has reported nothing for {now - beat:.0f} s", True
    return f"{late} within {seconds:.0f} s", False


def _process(
    pipe: Connection,
    place: tuple[int, int, str, float],
    variables: Mapping[str, str],
    cpu: bool,
    runner: int,
) -> None:
    end_with_parent()
    if os.getppid() != runner:
        os._exit(1)
    signal.set_wakeup_fd(-1)  # a signal for this process isn't the runner's
    os.environ.setdefault("NCCL_DEBUG", "WARN")  # where NCCL fails, only its own lines say why
    os.environ.update(variables)
    lock = Lock()

    def say(told: str | None) -> None:
        with lock:
            pipe.send(told)

    def beat() -> None:
        while True:
            say(None)
            time.sleep(BEAT_SECONDS)

    Thread(target=beat, daemon=True).start()
    try:
        import torch  # noqa: F401  # what takes long before the sums

        say("")
        say(_reduce(pipe.recv(), *place, cpu=cpu))
    except Exception as error:
        say(" ".join(str(error).split())[:300] or type(error).__name__)
    sys.stderr.flush()
    os._exit(0)  # what the runner has for its own end isn't this one's


def _reduce(port: int, node: int, nodes: int, address: str, seconds: float, *, cpu: bool) -> str:
    """What is wrong with the nodes' sums, "" for nothing; the first node prints their rate."""
    import torch
    from torch import distributed

    at = f"[{address}]" if ":" in address else address
    wait = timedelta(seconds=seconds)
    place: dict[str, Any] = {"rank": node, "world_size": nodes, "timeout": wait}
    distributed.init_process_group("gloo" if cpu else "nccl", f"tcp://{at}:{port}", **place)
    device = "cpu" if cpu else "cuda:0"
    sums = torch.full((ELEMENTS,), node + 1.0, device=device)
    distributed.all_reduce(sums)
    if not bool((sums == nodes * (nodes + 1) / 2).all()):
        return "the sums are wrong"
    told = allreduce.link_line(torch, device, nodes)
    if node == 0:
        words.say(told)
    return ""


def broken(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The nodes that hold it up; where none is to blame, what each says that has no sum."""
    without = [(node, one) for node, one in enumerate(found) if one["why"]]
    blamed = [(node, one) for node, one in without if one["blamed"]]
    return [f"node {node} ({one['host']}): {one['why']}" for node, one in blamed or without][:MOST]
