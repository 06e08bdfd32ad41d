"""A short all-reduce before ranks start: whoever holds it up is named on all nodes."""

from __future__ import annotations

import importlib
import os
import signal
import socket
from typing import Any

import pytest

from launcher.train.ranks import reduction
from launcher.train.ranks.meeting import Meeting

from .test_alike import together

pytestmark = pytest.mark.megatron

HOST = socket.gethostname()
LO = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(autouse=True)
def _imported() -> None:
    """As the runner has it, of which each process is a fork."""
    importlib.import_module("torch")


def look(here: Meeting) -> list[str]:
    return reduction.broken(reduction.look(here, LO, cpu=True))


def test_nodes_that_reach_each_other_sum_up() -> None:
    assert together(3, look) == [[], [], []]


def test_a_node_that_is_held_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it inside of gloo, and say nothing by which it could be known."""

    def held(node: int, *place: Any, cpu: bool) -> str:
        if node == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return reduce(node, *place, cpu=cpu)

    reduce = reduction._reduce
    monkeypatch.setattr(reduction, "_reduce", held)
    monkeypatch.setattr(reduction, "SECONDS", 4.0)
    why = f"node 1 ({HOST}): its process is held, and has said nothing for 4 s"
    assert together(3, look) == [[why]] * 3


@pytest.mark.long
def test_a_node_whose_process_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of memory: what the others say of it, they say of a connection."""

    def killed(node: int, *place: Any, cpu: bool) -> str:
        if node == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce(node, *place, cpu=cpu)

    reduce = reduction._reduce
    monkeypatch.setattr(reduction, "_reduce", killed)
    monkeypatch.setattr(reduction, "SECONDS", 3.0)
    assert together(3, look) == [[f"node 2 ({HOST}): its process was killed"]] * 3


def test_what_a_library_says_is_told_where_nobody_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interfaces that aren't there, which the nodes meet without."""
    monkeypatch.setitem(LO, "GLOO_SOCKET_IFNAME", "none0")
    for found in together(2, look):
        assert [line.partition(": ")[0] for line in found] == [f"node {n} ({HOST})" for n in (0, 1)]
        assert all("none0" in line for line in found)
