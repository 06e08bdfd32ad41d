"""Checks of what a machine gives to all its processes: shared and locked memory, a port."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.machine.finding import Finding
from launcher.machine.machine import UNLIMITED, Machine
from launcher.plan.config import RunConfig
from launcher.plan.plan import Plan
from launcher.plan.source import Origin

PRIVATE_SHM = 64 << 20
"""Bytes of a container's own /dev/shm where nothing else is said: docker run, --shm-size."""

SHM = 1 << 30
"""Bytes of /dev/shm that NVIDIA asks for with NCCL in a container, `--shm-size=1g`.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/runtime_and_mpi_issues.html
"""

SHM_SEGMENT = 4 << 20
"""Bytes of one of NCCL's segments, as in the failure that the same page shows."""

UNITS = {"b": 0, "k": 10, "m": 20, "g": 30}


def check(config: RunConfig, origin: Origin, plan: Plan, machine: Machine) -> Iterator[Finding]:
    """All of these."""
    several = plan.processes_per_node * plan.nodes > 1
    if plan.gpus.count and several:
        yield from _shm(origin, plan, machine)
        yield from _memlock(plan, machine)
    if plan.network == "host":  # else the nodes meet in a network that isn't this machine's
        yield from _meeting(config, origin, machine)


def shared_memory(plan: Plan, machine: Machine) -> int | None:
    """Bytes of /dev/shm that the processes of a run have."""
    if machine.engine is None or plan.ipc == "host":
        return machine.shm
    return size_of(plan.shm_size) if plan.shm_size else PRIVATE_SHM


def size_of(text: str) -> int:
    """Bytes of '512m'."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1].isalpha() else (text, "b")
    return int(number) << UNITS[unit]


def _shm(origin: Origin, plan: Plan, machine: Machine) -> Iterator[Finding]:
    have = shared_memory(plan, machine)
    if have is None or have >= SHM or plan.processes_per_node == 1:
        return
    host = machine.engine is None or plan.ipc == "host"
    yield Finding(
        f"{origin.of('resources.ipc')}: {have >> 20} MiB of /dev/shm for "
        f"{plan.processes_per_node} processes",
        "NCCL and data loaders pass data through it, and fail to start where it is full; "
        "NVIDIA asks for 1 GiB.",
        "Free or enlarge it: mount -o remount,size=8g /dev/shm"
        if host
        else "--set resources.ipc=private --set resources.shm_size=8g, or ipc: host",
        refuse=have < SHM_SEGMENT * plan.processes_per_node,
    )


def _memlock(plan: Plan, machine: Machine) -> Iterator[Finding]:
    wanted = dict(plan.ulimits).get("memlock")
    have = machine.memlock
    if wanted is None or have is None or have == UNLIMITED:
        return
    if wanted == UNLIMITED or wanted > have:
        yield Finding(
            f"memlock: {have >> 10} KiB of memory may be locked",
            "NCCL locks what it sends over InfiniBand, and fails there without; within one "
            "machine it does well.",
            "Raise it: ulimit -l unlimited, or LimitMEMLOCK=infinity for the engine's service.",
            refuse=False,
        )


def _meeting(config: RunConfig, origin: Origin, machine: Machine) -> Iterator[Finding]:
    nodes = config.nodes
    if nodes.count == 1:
        return
    if nodes.rank == 0 and machine.port is False:
        yield Finding(
            f"{origin.of('nodes.master_port')}: port {nodes.master_port} is taken",
            "The first node listens there for all others.",
            f"End what listens, or --set nodes.master_port={nodes.master_port + 1} on every node.",
            refuse=True,
        )
    if nodes.rank > 0 and machine.resolves is False:
        yield Finding(
            f"{origin.of('nodes.master_addr')}: {nodes.master_addr} isn't known here",
            "This node has to reach the first one by that name.",
            "Give an address, or a name in /etc/hosts.",
            refuse=False,
        )
