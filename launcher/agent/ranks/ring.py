"""Sends data around a ring of nodes, as an all-reduce does, to find slow or blocked pairs.

Ranks listen at ports that the kernel chooses, so this does as well.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from threading import Thread
from typing import Any

from launcher.agent.ranks.network import TRY_SECONDS, NetworkError, connect, listen, plain
from launcher.agent.ranks.rendezvous import MOST, Rendezvous

SIZE, SECONDS = 1 << 20, 10.0
"""Bytes that each node sends to the next one, all at once, and how long they may take."""

SLOW = 10e6
"""Bytes a second below which a link is slow: ranks exchange all gradients at every step."""

LATE_SECONDS = 2.0
"""How much later than its own attempt another's may be."""


def look(rendezvous: Rendezvous) -> list[dict[str, Any]]:
    """What each node found; all call it together. Raises RendezvousFailure where one leaves.

    sent: why it couldn't send to the next one, "" if it could; got: bytes from the one before, and
    seconds that they took; and its host.
    """
    with listen(0) as listener:
        here = [plain(rendezvous.own), listener.getsockname()[1], os.urandom(8).hex()]
        places = rendezvous.exchange(here, list)
        following = places[(rendezvous.node + 1) % rendezvous.nodes]
        failed = list[str]()
        sending = Thread(target=_send, args=(following, failed), daemon=True)
        sending.start()
        got, seconds = _receive(listener, here[2].encode())
        sending.join(TRY_SECONDS + SECONDS)
    told = {"host": socket.gethostname(), "sent": "".join(failed), "got": got, "seconds": seconds}
    found: list[dict[str, Any]] = rendezvous.exchange(told, list)
    return found


def _send(place: tuple[str, int, str], failed: list[str]) -> None:
    address, port, token = place
    try:
        with closing(connect(address, port)) as link:
            link.settimeout(SECONDS)
            link.sendall(token.encode() + bytes(SIZE))
    except NetworkError as unreached:
        failed.append(str(unreached))
    except OSError as error:
        failed.append(f"{address}:{port}: {error.strerror or 'it takes no more'}")


def _receive(listener: socket.socket, token: bytes) -> tuple[int, float]:
    """Bytes that came from whoever knows the token, and in what time."""
    until = time.monotonic() + TRY_SECONDS + LATE_SECONDS
    with suppress(OSError):
        while (left := until - time.monotonic()) > 0:
            listener.settimeout(left)
            with closing(listener.accept()[0]) as link:
                link.settimeout(left)
                if link.recv(len(token), socket.MSG_WAITALL) == token:
                    return _read(link)
    return 0, 0.0


def _read(link: socket.socket) -> tuple[int, float]:
    start, got = time.monotonic(), 0
    with suppress(OSError):
        while got < SIZE and (left := start + SECONDS - time.monotonic()) > 0:
            link.settimeout(left)
            if not (data := link.recv(1 << 16)):
                break
            got += len(data)
    return got, time.monotonic() - start


def broken(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pairs of which one doesn't reach the other, or not in time, and why."""
    lines = []
    for node, one in enumerate(found):
        before = (node - 1) % len(found)
        pair = f"node {before} ({found[before]['host']}) to node {node} ({one['host']})"
        if why := found[before]["sent"]:
            lines.append(f"{pair}: {why}")
        elif one["got"] < SIZE:
            of = f"{one['got'] >> 10} of {SIZE >> 10} KiB within {SECONDS:g} s"
            lines.append(f"{pair}: {of}: a slow link, or one that loses what is sent")
    return lines[:MOST]


def unfit(found: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """The nodes that are in most of the pairs that are broken or slow, and those pairs."""
    lines = [*broken(found), *slow(found)]
    pairs = [(line, {int(n) for n in re.findall(r"\bnode (\d+)", line)[:2]}) for line in lines]
    counts = Counter(node for _, pair in pairs for node in pair)
    most = [node for node, times in counts.items() if times == max(counts.values())]
    worst = max(most, default=0)  # of one pair alone the one that is sent to
    return {worst: next(line for line, pair in pairs if worst in pair)} if most else {}


def rates(found: Sequence[Mapping[str, Any]]) -> Iterator[float]:
    """Bytes a second to each node from the one before."""
    for one in found:
        yield one["got"] / max(one["seconds"], 1e-9)


def slow(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """The pairs whose link would hold up every step."""
    return [
        f"node {(node - 1) % len(found)} to node {node} ({found[node]['host']}): "
        f"{rate / 1e6:.1f} MB/s, a slow link"
        for node, rate in enumerate(rates(found))
        if rate < SLOW and found[node]["got"] == SIZE
    ][:MOST]
