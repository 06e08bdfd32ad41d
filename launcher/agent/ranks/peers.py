"""Watches the other nodes while ranks run: each node reports failures over the links they met by.

Else ranks wait for those of such a node until the time-out of what they communicate by.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock, Thread

from launcher.agent.ranks.command_line import MismatchError
from launcher.agent.ranks.rendezvous import Link, Rendezvous, ready

GONE_CODE = 1
"""The exit code where a node has gone without one: starting again may help."""

DONE_SECONDS = 10.0
"""How long a node that is done waits for the others to be, which may have numbers of the run."""


@dataclass(frozen=True)
class RemoteFailure:
    """Another node's first failure, in words that name it, and the exit code that it had."""

    why: str
    code: int


@dataclass(frozen=True)
class RanksRefused(RemoteFailure):
    """This node's ranks may not go on: another run has their folder, or GPUs don't fit them."""

    code: int = MismatchError.code


class PeerNodes:
    """Listens to the others until they are done, and informs them of this node; once each.

    The first node passes on to all what it hears of one. `hear` is called in a thread.
    """

    def __init__(self, rendezvous: Rendezvous, hear: Callable[[RemoteFailure], object]) -> None:
        self.rendezvous, self.hear = rendezvous, hear
        self.lock, self.told, self.diverged = Lock(), False, 0
        self.listener = Thread(target=self._listen, daemon=True)
        self.listener.start()

    def failed(self, why: str, code: int) -> None:
        """Report this node's failure to the others."""
        me = f"node {self.rendezvous.node} ({socket.gethostname()})"
        self._tell(RemoteFailure(f"{me}: {why}", code))

    def done(self, diverged: int = 0) -> int:
        """Report to them that it has ended as it should, and from where on its numbers were NaN.

        Returns that iteration, of whichever node it is; 0 for none.
        """
        self.diverged = self.diverged or diverged
        if self.rendezvous.node:
            self._tell(None)
        self.listener.join(DONE_SECONDS)
        self._tell(None)
        return self.diverged

    def _tell(self, failure: RemoteFailure | None, but: Link | None = None) -> None:
        with self.lock:
            if not self.told:
                self.told = True
                for link in self.rendezvous.links:
                    if link is not but:
                        link.send(failed=failure and vars(failure), diverged=self.diverged)

    def _listen(self) -> None:
        links = [*self.rendezvous.links]
        while links:
            for link in [link for link in links if link.whole] or ready(links, None):
                found = self._heard(link)
                if found != ():
                    links.remove(link)
                for failure in found or ():
                    if not self.rendezvous.node:
                        self._tell(failure, link)
                    self.hear(failure)

    def _heard(self, link: Link) -> tuple[RemoteFailure, ...] | None:
        """What a node has come to: None where it is done, () as long as not all has arrived."""
        try:
            if (told := link.read()) is None:
                return ()
            failure, self.diverged = told["failed"], self.diverged or int(told.get("diverged", 0))
            return (RemoteFailure(str(failure["why"]), int(failure["code"])),) if failure else None
        except (KeyError, TypeError, ValueError, ConnectionError):
            why = "it ended without a word"
        except OSError as error:
            why = error.strerror or "the link is cut"
        return (RemoteFailure(f"{link} has gone: {why}", GONE_CODE),)
