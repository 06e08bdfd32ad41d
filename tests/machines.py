"""Two network namespaces as two machines, with a cable between."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

FIRST, SECOND = "10.99.7.1", "10.99.7.2"


def ip(line: str) -> None:
    done = subprocess.run(["ip", *shlex.split(line)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"ip {line}: {done.stderr}"


@contextmanager
def machines_of(processes: Sequence[int] = ()) -> Iterator[list[str]]:
    """The namespaces of two machines, which know each other's address by `cable`.

    processes: two whose own namespaces they are; without them they are new and empty.
    """
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces take root, and ip")
    names = [f"launchpad-{os.getpid()}-{node}" for node in (0, 1)]
    made = [f"attach {name} {process}" for name, process in zip(names, processes, strict=False)]
    try:
        for made_by in made or [f"add {name}" for name in names]:
            ip(f"netns {made_by}")
        one, other = names
        ip(f"-n {one} link add cable type veth peer name cable netns {other}")
        for name, address in zip(names, (FIRST, SECOND), strict=True):
            ip(f"-n {name} address add {address}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, timeout=300)


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two that are new and empty."""
    with machines_of() as names:
        yield names
