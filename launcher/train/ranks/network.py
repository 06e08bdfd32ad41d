"""Ports of other nodes: reached, or why not."""

from __future__ import annotations

import socket

TRY_SECONDS = 5.0
"""How long one attempt to reach another node may take: a packet is sent three times meanwhile."""

BACKLOG = 1024


class Unreached(Exception):
    """No connection to another node: the text says why."""


def listen(port: int) -> socket.socket:
    """A listener at all addresses of this machine, of both families if it can. Raises OSError."""
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=BACKLOG)
    family = socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=True)


def connect(address: str, port: int, seconds: float = TRY_SECONDS) -> socket.socket:
    """A connection to another node. Raises Unreached."""
    try:
        made = socket.create_connection((address, port), seconds)
        if made.getsockname() == made.getpeername():  # a free port of this machine meets itself
            made.close()
            raise ConnectionRefusedError
    except ConnectionRefusedError:
        why = "nobody listens there: it hasn't begun, or has another port"
    except TimeoutError:
        why = "no answer: a firewall drops what comes, or the link is cut"
    except socket.gaierror:
        why = "that name isn't known here: give an address, or a name of /etc/hosts"
    except OSError as error:
        why = f"{error.strerror}: the link is cut, or the address is of another network"
    else:
        return made
    raise Unreached(f"{address}:{port}: {why}")
