"""Nodes that look at each other: two network namespaces as two machines, with a cable between."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.agent.ranks import network, ring
from launcher.runs.checks import reachability
from launcher.runs.checks.machine_report import OK, WARNING
from tests.machines import FIRST, SECOND, ip

ROOT = Path(__file__).parents[3]
PORT = 29500
WAIT = 2.0
"""Seconds for those that never come; else they have ten."""

TEN = pytest.mark.parametrize(
    "time_", [0, *(pytest.param(n, marks=pytest.mark.long) for n in range(1, 10))]
)
"""Nine times more in the long run: what is told mustn't depend on which node is the quicker."""


def looks(
    machines: list[str], wait: float = 10, second: str = "", **env: str
) -> list[tuple[int, str]]:
    """Exit code and words of each; `second` are more words of the second one, `env` its own."""

    def one(node: int) -> tuple[int, str]:
        line = [*("ip", "netns", "exec", machines[node]), sys.executable, "-m", "launcher"]
        line += f"doctor --nodes 2 --node-rank {node} --master-addr {FIRST}".split()
        line += ["--wait", str(wait), *(second.split() if node else [])]
        variables = {name: value for name, value in os.environ.items() if "SOCKET" not in name}
        variables |= {"PYTHONPATH": str(ROOT)} | (env if node else {network.GLOO: "cable"})
        done = subprocess.run(line, capture_output=True, text=True, env=variables, timeout=300)
        return done.returncode, done.stdout + done.stderr

    start = time.monotonic()
    with ThreadPoolExecutor() as pool:
        found = [*pool.map(one, (0, 1))]
    assert time.monotonic() - start < wait + 240, found  # no hang
    return found


@TEN
def test_machines_that_find_each_other(machines: list[str], time_: int) -> None:
    for code, text in looks(machines, GLOO_SOCKET_IFNAME="cable"):
        assert code == 0, text
        assert f": cable {FIRST}, " in text
        assert f": cable {SECOND}, " in text
        assert "MB/s from node 0" in text
        assert f"all 2 reach {FIRST}:{PORT}" in text
        warned = [line for line in text.splitlines() if "warning" in line]
        assert all("a slow link" in line for line in warned), text  # which load makes one of it


@TEN
def test_a_slow_link_is_told_from_a_good_one(machines: list[str], time_: int) -> None:
    limit = "tc qdisc add dev cable root tbf rate 4mbit burst 16kb latency 200ms"
    subprocess.run(["ip", "netns", "exec", machines[1], *limit.split()], check=True, timeout=300)
    for code, text in looks(machines, GLOO_SOCKET_IFNAME="cable"):
        assert code == 0, text
        assert re.search(r"warning  node 0 .* MB/s from node 1: a slow link", text), text


def test_only_a_slow_link_is_warned_of() -> None:
    """A good one by a given rate: how fast a real one is depends on what else the machine does."""
    facts = {"GPUs": "8", "driver": ""}
    known = [reachability.Node(name, name, "cable", facts, ()) for name in ("n0", "n1")]
    found = [{"got": ring.SIZE, "seconds": ring.SIZE / (ring.SLOW * by)} for by in (1.01, 0.99)]
    told = reachability.lines(known, found, [{"time": 0.0}] * 2)
    assert [(line.state, "slow" in line.found) for line in told] == [(OK, False), (WARNING, True)]


@TEN
def test_a_port_that_is_closed_but_for_the_first(machines: list[str], time_: int) -> None:
    """Ranks would meet, and then wait for each other until their time-out."""
    ip(f"-n {machines[1]} rule add to {FIRST} ipproto tcp dport {PORT + 1}-65534 unreachable")
    for code, text in looks(machines):
        assert code == 121, text
        assert re.search(rf"node 1 \(.*\) to node 0 \(.*\): {FIRST}:\d+: .*unreachable", text)
        assert "reach each other at all ports" in text


@TEN
@pytest.mark.parametrize(
    ("cut", "why"),
    [
        ("-n {1} link set cable down", "unreachable: the link is cut"),
        *(
            pytest.param(cut, why, marks=pytest.mark.long)
            for cut, why in (
                ("-n {0} link set cable down", f"{FIRST}:{PORT}: "),
                ("-n {0} route add blackhole 10.99.7.2/32", "no answer: a firewall drops"),
            )
        ),
    ],
)
def test_a_link_that_is_cut(cut: str, why: str, machines: list[str], time_: int) -> None:
    ip(cut.format(*machines))
    (code, first), (other, second) = looks(machines, WAIT)
    assert (code, other) == (121, 121)
    assert f"node 1 didn't come to {FIRST}:{PORT}, after {WAIT:g} s" in first
    assert f"{FIRST} (cable)" in first
    assert why in second


def met(machine: str) -> bool:
    """Whether another one has come to its port."""
    argv = ["ip", "netns", "exec", machine, "cat", "/proc/net/tcp6", "/proc/net/tcp"]
    told = subprocess.run(argv, check=True, timeout=300, capture_output=True, text=True).stdout
    return any(
        local.endswith(f":{PORT:04X}") and state == "01"
        for _, local, _, state, *_ in map(str.split, told.splitlines())
    )


@pytest.mark.long
@TEN
def test_a_link_that_is_cut_while_they_meet(machines: list[str], time_: int) -> None:
    limit = "tc qdisc add dev cable root tbf rate 400kbit burst 16kb latency 200ms"
    subprocess.run(["ip", "netns", "exec", machines[1], *limit.split()], check=True, timeout=300)
    with ThreadPoolExecutor() as pool:
        both = pool.submit(looks, machines)
        until = time.monotonic() + 10
        while not met(machines[0]) and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(1)  # what each sends takes twenty
        ip(f"-n {machines[1]} link set cable down")
        (code, first), (other, second) = both.result()
    assert (code, other) == (121, 121)
    assert "the link to node 1 (" in first
    assert "--master-addr" not in first
    assert f"the link to node 0 ({FIRST}:{PORT}) is cut: " in second


@TEN
def test_a_port_where_nobody_listens(machines: list[str], time_: int) -> None:
    _, (code, text) = looks(machines, WAIT, f"--master-port {PORT + 1}")
    assert code == 121
    assert f"{FIRST}:{PORT + 1}: nobody listens there" in text


@TEN
def test_the_wrong_interface_is_told_on_all_nodes(machines: list[str], time_: int) -> None:
    """Ranks that take another than the nodes met by wait for each other until their time-out."""
    for code, text in looks(machines, GLOO_SOCKET_IFNAME="lo", NCCL_SOCKET_IFNAME="ib,eth"):
        assert code == 0, text
        assert "warning  node 1  GLOO_SOCKET_IFNAME=lo means lo, and the nodes met by ca" in text
        assert "NCCL_SOCKET_IFNAME=ib,eth means none of this machine" in text
        assert "Set NCCL_SOCKET_IFNAME=cable in the env of this node's run." in text


@pytest.mark.parametrize(
    ("value", "takes"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth0", ["eth0"]),
        ("^docker,lo", ["eth0", "eth1", "ib0"]),
        ("ib,eth1", ["eth1", "ib0"]),
        ("^=eth0", ["lo", "docker0", "eth1", "ib0"]),
    ],
)
def test_what_nccl_takes_a_variable_for(value: str, takes: list[str]) -> None:
    there = ["lo", "docker0", "eth0", "eth1", "ib0"]
    assert network.chosen(network.NCCL, value, there) == takes


def test_a_bridge_is_not_left_to_nccl(machines: list[str]) -> None:
    """libvirt's comes before the network's own card on many machines, and leads nowhere."""
    for line in (
        *("link delete cable", "link add virbr0 type bridge", "link add cable type veth"),
        *("address add 192.168.122.1/24 dev virbr0", f"address add {FIRST}/24 dev cable"),
        *("link set virbr0 up", "link set cable up"),
    ):
        ip(f"-n {machines[0]} {line}")
    program = (
        "from launcher.agent.ranks import alike\n"
        f"print(alike._interface('{FIRST}', {{'GLOO_SOCKET_IFNAME': 'cable'}}))"
    )
    argv = ["ip", "netns", "exec", machines[0], sys.executable, "-c", program]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=300)
    assert done.stdout == "{'NCCL_SOCKET_IFNAME': 'cable'}\n", done
    assert "by which the nodes met: NCCL would take virbr0 first" in done.stderr


def test_what_ranks_take_by_themselves() -> None:
    """A name that stands for 127.0.1.1, as Debian has it, keeps gloo's ranks to themselves."""
    there = {"lo": ["127.0.0.1"], "virbr0": ["192.168.122.1"], "eth0": ["10.0.0.1"], "eth1": []}
    environ: Mapping[str, str] = {}
    assert [*network.misled("eth0", there, environ, "10.0.0.1")] == [
        (network.NCCL, "NCCL would take virbr0 first")
    ]
    told = dict(network.misled("virbr0", there, environ, "127.0.1.1"))
    assert told == {network.GLOO: "gloo would take none, which this machine's name stands for"}
