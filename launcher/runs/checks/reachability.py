"""Checks whether the nodes of a run reach each other: `launcher doctor --nodes`."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from launcher.agent.ranks import alike, network, ring
from launcher.agent.ranks.rendezvous import Rendezvous, RendezvousFailure
from launcher.runs.checks.machine_report import OK, REFUSED, WARNING, Line

NAME = "nodes"
"""Of the line that says whether all have met."""


@dataclass(frozen=True)
class Node:
    """A node's facts; `misled` are variables of ranks, and why they are wrong."""

    host: str
    address: str
    interface: str
    facts: Mapping[str, str]
    misled: Sequence[tuple[str, str]]

    @classmethod
    def here(cls, address: str, facts: Mapping[str, str], environ: Mapping[str, str]) -> Node:
        """This one, which reaches the others by an address."""
        there = network.interfaces()
        used = network.interface_of(address, there)
        misled = dict(network.misled(used, there, environ, network.own_address()))
        if network.GLOO not in environ:  # then the runner sets it
            misled.pop(network.GLOO, None)
        return cls(socket.gethostname(), network.plain(address), used, facts, [*misled.items()])


def look(
    rendezvous: Rendezvous, facts: Mapping[str, str], environ: Mapping[str, str], seconds: float
) -> list[Line]:
    """Meet the others, for so many seconds, and say of each what it is; the same on all nodes."""
    with closing(rendezvous):
        try:
            rendezvous.join(seconds)
        except RendezvousFailure as failed:
            return [Line(NAME, REFUSED, str(failed), _addresses(rendezvous))]
        try:
            found = ring.look(rendezvous)
            here = Node.here(rendezvous.own, facts, environ)
            known = [Node(**one) for one in rendezvous.exchange(vars(here), list)]
            now = rendezvous.exchange({"host": here.host, "time": time.time()}, list)
        except RendezvousFailure as failed:
            return [Line(NAME, REFUSED, str(failed))]
    where = f"{rendezvous.address}:{rendezvous.port}"
    return [*lines(known, found, now), *_compared(known, now, ring.broken(found), where)]


def _addresses(rendezvous: Rendezvous) -> str:
    """What the first node is to be called, where the others don't come."""
    if rendezvous.node:
        return ""
    found = network.interfaces().items()
    its = ", ".join(f"{address} ({name})" for name, several in found for address in several)
    return f"--master-addr must be an address of this machine that the others can reach: {its}"


def lines(
    known: Sequence[Node], found: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]
) -> Iterator[Line]:
    """Each node's, and what is wrong with it; `found` by the ring."""
    for number, (node, rate, its) in enumerate(zip(known, ring.rates(found), now, strict=True)):
        name = f"node {number}"
        text = f"{node.host}: {node.interface} {node.address}, {node.facts['GPUs']} GPUs"
        text += f", driver {node.facts['driver']}" if node.facts["driver"] else ""
        before = f"node {(number - 1) % len(known)}"
        text += (
            f", clock {its['time'] - now[0]['time']:+.1f} s, {rate / 1e6:.1f} MB/s from {before}"
        )
        if rate < ring.SLOW:
            mend = f"`ethtool {node.interface}` shows its speed, `ping` the time of a packet."
            yield Line(name, WARNING, f"{text}: a slow link", mend)
        else:
            yield Line(name, OK, text)
        for variable, why in node.misled:
            mend = f"Set {variable}={node.interface} in the env of this node's run."
            yield Line(name, WARNING, f"{why}, and the nodes met by {node.interface}", mend)


def _compared(
    known: Sequence[Node], now: Sequence[Mapping[str, Any]], broken: Sequence[str], where: str
) -> Iterator[Line]:
    for pair in broken:
        yield Line(
            NAME, REFUSED, pair, "Let all nodes reach each other at all ports: ranks use any port."
        )
    for clock in alike.clocks(now):
        yield Line(NAME, WARNING, clock)
    wrong = alike.differences([vars(node) for node in known])
    for line in wrong:
        yield Line(NAME, REFUSED, line, f"{alike.MAY_DIFFER}=1 in a run's env starts it anyway")
    if not wrong and not broken:
        yield Line(NAME, OK, f"all {len(known)} reach {where}")
