"""A short all-reduce before ranks start: whoever holds it up is named on all nodes."""

from __future__ import annotations

import builtins
import importlib
import multiprocessing
import os
import signal
import socket
import time
from typing import Any

import pytest

from launcher.agent import words
from launcher.agent.ranks import network, reduction, ring
from launcher.agent.ranks.command_line import MismatchError
from launcher.agent.ranks.rendezvous import Rendezvous

from .test_alike import together

pytestmark = pytest.mark.megatron

HOST = socket.gethostname()
LO = {"GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(autouse=True)
def _imported() -> None:
    """As the runner has it, of which each process is a fork."""
    importlib.import_module("torch")


def look(here: Rendezvous, seconds: float = 30) -> list[str]:
    return reduction.broken(reduction.look(here, LO, cpu=True, seconds=seconds))


def test_512_nodes_have_longer_and_are_told_of_within_a_minute() -> None:
    """With what goes before: TRY_SECONDS, and a ring's. Two nodes' 30 s were theirs as well."""
    before = network.TRY_SECONDS + ring.SECONDS
    assert reduction.limit(2, {}) < reduction.limit(512, {}) <= 60 - before
    assert reduction.limit(1 << 20, {}) <= 60 - before
    assert reduction.limit(512, {reduction.LIMIT: "90.5"}) == 90.5
    for wrong in ("0", "-1", "nan", "a"):
        with pytest.raises(MismatchError, match=f"{reduction.LIMIT}: '{wrong}'"):
            reduction.limit(2, {reduction.LIMIT: wrong})


def test_nodes_that_reach_each_other_sum_up(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On their CPUs, also where there are GPUs, which such a run leaves alone."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *given: "a GPU")
    assert together(3, look) == [[], [], []]
    (found,) = words.LINK.findall(capfd.readouterr().err)
    assert found[:3] == ("3", "1", "CPU")
    assert 0 < float(found[3]) < 1000


@pytest.mark.long
def test_torch_may_load_longer_than_the_sums_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a busy file server it took more than the 30 s of both, and a sound node was refused."""

    def load(name: str, *more: Any, **named: Any) -> Any:
        if name == "torch" and not loaded:
            loaded.append(name)
            time.sleep(12)
        return real(name, *more, **named)

    loaded, real = list[str](), builtins.__import__
    monkeypatch.setattr(builtins, "__import__", load)
    assert together(2, lambda here: look(here, 10)) == [[], []]


def test_a_node_that_cant_load_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 nodes the first 8 were named, which wait for it; and no spare took its place."""

    def process(pipe: Any, place: Any, *more: Any) -> None:
        here.append(place[0])
        run(pipe, place, *more)

    def load(name: str, *more: Any, **named: Any) -> Any:
        if name == "torch" and here == [1]:
            raise ImportError("libcudnn.so.9: no such file")
        return real(name, *more, **named)

    here, real, run = list[int](), builtins.__import__, reduction._process
    monkeypatch.setattr(builtins, "__import__", load)
    monkeypatch.setattr(reduction, "_process", process)
    why = f"node 1 ({HOST}): libcudnn.so.9: no such file"
    assert together(2, lambda here: look(here, 1)) == [[why]] * 2


def test_a_process_that_is_killed_before_it_reads_its_port_has_ended() -> None:
    """The reset of its pipe ended the runner by a traceback, and no other node knew why."""
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    ended = multiprocessing.get_context("fork").Process(target=os.getpid)
    ended.start()
    ended.join()
    ours.send(29500)
    theirs.close()
    heard = reduction._heard(ended, ours, lambda: False, 30, "no sum")
    assert heard == ("its process was killed", True)


def test_a_node_that_is_held_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait for it inside of gloo, and say nothing by which it could be known."""

    def held(port: int, node: int, *place: Any, cpu: bool) -> str:
        if node == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        return reduce(port, node, *place, cpu=cpu)

    reduce = reduction._reduce
    monkeypatch.setattr(reduction, "_reduce", held)
    why = f"node 1 ({HOST}): its process is held, and has reported nothing for 4 s"
    assert together(3, lambda here: look(here, 4)) == [[why]] * 3


@pytest.mark.long
def test_a_node_whose_process_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for want of memory: what the others say of it, they say of a connection."""

    def killed(port: int, node: int, *place: Any, cpu: bool) -> str:
        if node == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return reduce(port, node, *place, cpu=cpu)

    reduce = reduction._reduce
    monkeypatch.setattr(reduction, "_reduce", killed)
    assert (
        together(3, lambda here: look(here, 3))
        == [[f"node 2 ({HOST}): its process was killed"]] * 3
    )


def test_what_a_library_says_is_told_where_nobody_is_to_blame(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interfaces that aren't there, which the nodes meet without."""
    monkeypatch.setitem(LO, "GLOO_SOCKET_IFNAME", "none0")
    for found in together(2, look):
        assert [line.partition(": ")[0] for line in found] == [f"node {n} ({HOST})" for n in (0, 1)]
        assert all("none0" in line for line in found)
