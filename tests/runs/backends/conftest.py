"""Plans made by hand, with everything in them that a backend must carry over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.values import Gpus

BARE = Plan(
    run="0a1b2c3d",
    name="test",
    image="some/image:1",
    argv=("python3", "-c", "pass"),
    env=(),
    mounts=(),
    gpus=Gpus(0),
    nodes=1,
    processes_per_node=1,
    ipc="private",
    shm_size=None,
    memory=None,
    ulimits=(),
    network=None,
    user=None,
    workdir=None,
    init=True,
    stop_grace=10,
    labels=(("megatron-launchpad.run", "0a1b2c3d"),),
)

FULL: dict[str, Any] = {
    "argv": ("sh", "-c", 'echo "$HOME" it\'s', "", "--a b"),
    "env": (("EMPTY", ""), ("QUOTED", "a 'b' \"c\" $d"), ("TOKEN", None)),
    "mounts": (
        Mount("/tmp", "/data one/a", True, "data.path"),  # noqa: S108
        Mount("/var/tmp", "/out,put", False, "checkpoint.save"),  # noqa: S108
    ),
    "gpus": Gpus(2, ("0", "1")),
    "shm_size": "64m",
    "memory": "512m",
    "tie": True,
    "ulimits": (("memlock", -1), ("stack", 67108864)),
    "network": "none",
    "user": "12345:100",
    "groups": (44, 110),
    "devices": ("/dev/infiniband", "/dev/fuse:/dev/fuse2:rw"),
    "cap_add": ("IPC_LOCK",),
    "workdir": "/tmp",  # noqa: S108
}


@pytest.fixture
def bare() -> Plan:
    """A plan with as little in it as there can be."""
    return BARE


@pytest.fixture
def full() -> Plan:
    """A plan with something in every field, and with what needs quoting."""
    return replace(BARE, **FULL)
