"""Lets the nodes of a run meet before their ranks start: each connects to the first one.

It is the port at which the ranks' own store listens afterwards. That one can't say who is missing,
nor give up when asked to; and a launcher on the host meets others the same way, without torch.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from launcher.agent.ranks.network import NetworkError, connect, listen

GREETING_SECONDS = 5.0
ROUND_SECONDS = 60.0
"""How long nodes that have met wait for each other's facts."""

MARGIN_SECONDS = 5.0
"""How much longer the others wait, so that the first one can say for whom it did."""

STEP_SECONDS = 0.2
PATIENCE = (10.0, 60.0)
"""After how many seconds those that are waited for are named, and how often from then on."""

LAST_CALL_SECONDS = 30.0
"""How long those that are missing have after the last that came, where a run can do without."""

MOST = 8
"""Nodes that are named at once."""

LONGEST = 1 << 22
"""Bytes of a line."""

OPTIONS = (
    *((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3)),
    *((socket.TCP_USER_TIMEOUT, 15_000), (socket.TCP_NODELAY, 1)),
)
"""A link counts as cut where nothing is acknowledged for about 15 s, though the kernel asks."""

HELLO = {"launcher": "node 0"}
"""The first node's greeting: others that listen at its port don't send it."""


class RendezvousFailure(Exception):
    """The nodes don't meet: the text names the node, and says why."""


class NodeNotNeeded(RendezvousFailure):
    """The others go on without this node."""


class StopWaiting(Exception):
    """Whoever waits was asked to give up."""


class Link:
    """A connection that carries JSON, an object a line; `node` and `host` are its other end's."""

    def __init__(self, connection: socket.socket, host: str = "", node: int = 0) -> None:
        self.socket, self.host, self.node, self.buffer = connection, host, node, b""
        self.lost: OSError | None = None
        connection.settimeout(ROUND_SECONDS)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in OPTIONS:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def __str__(self) -> str:
        return f"node {self.node} ({self.host})"

    def fileno(self) -> int:
        return self.socket.fileno()

    @property
    def whole(self) -> bool:
        """Whether a line has come already: the first node may fail right after it answered."""
        return b"\n" in self.buffer

    def send(self, **told: object) -> None:
        """An end of the other one shows once all that it sent is read."""
        try:
            self.socket.sendall(json.dumps(told).encode() + b"\n")
        except OSError as error:
            self.lost = error

    def read(self) -> dict[str, Any] | None:
        """What has come, None until it is whole. Raises OSError at the end, or for nonsense."""
        if not self.whole:
            data = self.socket.recv(1 << 16)
            self.buffer += data
            if not data or len(self.buffer) > LONGEST:
                raise self.lost or ConnectionError
        if not self.whole:
            return None
        line, _, self.buffer = self.buffer.partition(b"\n")
        with suppress(ValueError, RecursionError):
            if isinstance(told := json.loads(line), dict):
                return told
        raise ConnectionError


@dataclass
class Rendezvous:
    """All nodes, of which this is `node`, and the first one at `address` and `port`.

    `stopped` says whether to give up, which raises StopWaiting out of all that waits. The first
    node has a link to each of the others, the others one to it. `fewer` are numbers of nodes that
    will do where some don't come: those that have are numbered anew then, in their order.
    """

    node: int
    nodes: int
    address: str
    port: int
    tell: Callable[[str], object]
    stopped: Callable[[], object] = lambda: False
    fewer: Sequence[int] = ()
    links: list[Link] = field(default_factory=list)

    def join(self, seconds: float) -> None:
        """Wait until all nodes are here, or enough.

        Raises RendezvousFailure with those missing, and why; NodeNotNeeded where others suffice.
        """
        if self.node:
            self._reach(seconds)
            me = {"node": self.node, "nodes": self.nodes, "host": socket.gethostname()}
            self.node, self.nodes = self._asked(me, seconds, "waits for others")
            if self.node >= self.nodes:
                raise NodeNotNeeded(
                    f"the run goes on with {self.nodes} nodes, and this one is over"
                )
            return
        with self._telling(), self._listening() as listener:
            self._gather(listener, seconds)
        self._number()

    def exchange(
        self, mine: object, answer: Callable[[list[Any]], Any], seconds: float = ROUND_SECONDS
    ) -> Any:
        """The first node's `answer` to the facts of all, in their order.

        All call it together. Raises RendezvousFailure on all where one of them leaves or hangs.
        """
        if self.node:
            return self._asked({"told": mine}, seconds, "says nothing")
        told = {0: mine}
        with self._telling():
            for _ in self._steps(seconds, lambda: self._silent(told)):
                pending = [link for link in self.links if link.node not in told]
                if not pending:
                    break
                for link in ready(pending):
                    if (said := _heard(link)) is not None:
                        told[link.node] = said.get("told")
        answered = answer([told[node] for node in range(self.nodes)])
        for link in self.links:
            link.send(told=answered)
        return answered

    def go_on_with(self, chosen: Sequence[int]) -> None:
        """Go on with these nodes, the first one among them, which are numbered anew.

        All call it together, with the same ones. Raises NodeNotNeeded on the others.
        """
        if self.node not in chosen:
            raise NodeNotNeeded(f"the run goes on with {len(chosen)} nodes, and this one is spare")
        for link in [*self.links] if self.node == 0 else ():
            if link.node in chosen:
                link.node = chosen.index(link.node)
            else:
                self._let_go(link)
        self.node, self.nodes = chosen.index(self.node), len(chosen)

    @property
    def own(self) -> str:
        """The address by which this node and the first one, or another, reach each other."""
        return str(self.links[0].socket.getsockname()[0])

    def close(self) -> None:
        for link in self.links:
            link.socket.close()

    def _steps(self, seconds: float, why: Callable[[], str]) -> Iterator[None]:
        """Waits so many seconds, naming the missing. Raises RendezvousFailure, StopWaiting."""
        start, (said, again) = time.monotonic(), PATIENCE
        while (past := time.monotonic() - start) < seconds:
            if self.stopped():
                raise StopWaiting
            if past > said:
                self.tell(f"waiting: {why()}")
                said += again
            yield
        raise RendezvousFailure(f"{why()}, after {seconds:g} s")

    # The first node

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Let all others fail as this does."""
        try:
            yield
        except RendezvousFailure as failed:
            for link in self.links:
                link.send(failed=str(failed))
            raise

    def _listening(self) -> socket.socket:
        try:
            return listen(self.port)
        except OSError as error:
            why = f"node 0 can't listen at port {self.port}: {error.strerror}"
            raise RendezvousFailure(f"{why}; `ss -ltnp` says who does") from None

    def _gather(self, listener: socket.socket, seconds: float) -> None:
        """Take in the others; one that leaves may come again, and strangers are let go."""
        least, here, came = min(self.fewer, default=self.nodes), 0, 0.0
        for _ in self._steps(seconds, self._missing):
            if here != (here := self.nodes - len(self._absent())):
                came = time.monotonic()
            late = time.monotonic() - came >= LAST_CALL_SECONDS
            if here == self.nodes or (here >= least and late):
                break
            for one in ready([listener, *self.links]):
                if one is not listener:
                    self._greet(one)
                    continue
                self.links.append(Link(listener.accept()[0]))
                self.links[-1].send(**HELLO)
        for stranger in [link for link in self.links if not link.node]:
            self._let_go(stranger)

    def _greet(self, link: Link) -> None:
        """Take in who says which node it is. Raises RendezvousFailure where that can't be."""
        try:
            if (told := link.read()) is None:
                return
            node, nodes, host = int(told["node"]), int(told["nodes"]), str(told["host"])
            if not 0 <= node < nodes:
                raise ValueError
        except (OSError, ValueError, KeyError, TypeError):
            self._let_go(link)
            return
        known = {one.node: one.host for one in self.links} | {0: socket.gethostname()}
        link.node, link.host = node, host
        if nodes != self.nodes:
            raise RendezvousFailure(f"{link} is one of {nodes} nodes, and node 0 of {self.nodes}")
        if node in known:
            raise RendezvousFailure(f"{known[node]} and {host} both say that they are node {node}")

    def _number(self) -> None:
        """Send each its number, and of how many; those that are over are let go."""
        self.links.sort(key=lambda link: link.node)
        here = 1 + len(self.links)
        if here < self.nodes:
            why, all_nodes = self._missing(), self.nodes
            self.nodes = max(n for n in self.fewer if n <= here)
            self.tell(f"going on with {self.nodes} of {all_nodes} nodes: {why}")
        for node, link in enumerate([*self.links], 1):
            link.node = node
            link.send(told=[node, self.nodes])
            if node >= self.nodes:
                self._let_go(link)

    def _let_go(self, link: Link) -> None:
        link.socket.close()
        self.links.remove(link)

    def _absent(self) -> list[int]:
        here = {link.node for link in self.links}
        return [node for node in range(1, self.nodes) if node not in here]

    def _missing(self) -> str:
        return f"{named(self._absent())} didn't come to {self.address}:{self.port}"

    def _silent(self, told: dict[int, Any]) -> str:
        silent = [str(link) for link in self.links if link.node not in told]
        return f"{', '.join(silent[:MOST])} hangs, or the link to it is cut"

    # The others

    def _reach(self, seconds: float) -> None:
        """A link to the first node, known by its greeting."""
        at, why = f"{self.address}:{self.port}", [""]
        for _ in self._steps(seconds, lambda: why[-1]):
            try:
                link = Link(connect(self.address, self.port), at)
                self.links = [link]
                if self._next(link, GREETING_SECONDS, "says nothing") == HELLO:
                    return
            except NetworkError as error:
                why.append(str(error))
            except RendezvousFailure:
                why.append(f"what listens at {at} is no first node of a run that begins")
                link.socket.close()
            time.sleep(STEP_SECONDS)

    def _asked(self, mine: dict[str, Any], seconds: float, does: str) -> Any:
        """What the first node answers, once it has heard all others."""
        (link,) = self.links
        link.send(**mine)
        answer = self._next(link, seconds + MARGIN_SECONDS, does)
        if "failed" in answer:
            raise RendezvousFailure(answer["failed"])
        return answer["told"]

    def _next(self, link: Link, seconds: float, does: str) -> dict[str, Any]:
        for _ in self._steps(seconds, lambda: f"{link} {does}"):
            if (link.whole or ready([link])) and (said := _heard(link)) is not None:
                return said
        raise AssertionError  # the steps raise in the end


def _heard(link: Link) -> dict[str, Any] | None:
    """What a node sent, None until it is whole. Raises RendezvousFailure where it has gone."""
    try:
        return link.read()
    except ConnectionError:
        raise RendezvousFailure(f"{link} has left: see what it says there") from None
    except OSError as error:
        raise RendezvousFailure(f"the link to {link} is cut: {error.strerror}") from None


def ready(several: Iterable[Any], seconds: float | None = STEP_SECONDS) -> list[Any]:
    """Those of the sockets that can be read, [] where none can within the seconds."""
    return wait([*several], seconds)


def named(nodes: Sequence[int]) -> str:
    """'node 1, 3', and of many the first ones."""
    more = f" and {len(nodes) - MOST} more" if len(nodes) > MOST else ""
    return f"node {', '.join(map(str, nodes[:MOST]))}{more}"
