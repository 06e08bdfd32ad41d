"""Checks whether other nodes' ports can be reached, and by which interface."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

TRY_SECONDS = 5.0
"""How long one attempt to reach another node may take: a packet is sent three times meanwhile."""

BACKLOG = 1024


class NetworkError(Exception):
    """No connection to another node: the text says why."""


def listen(port: int) -> socket.socket:
    """A listener at all addresses of this machine, of both families if it can. Raises OSError."""
    if not socket.has_dualstack_ipv6():
        return socket.create_server(("", port), backlog=BACKLOG)
    family = socket.AF_INET6
    return socket.create_server(("", port), family=family, backlog=BACKLOG, dualstack_ipv6=True)


def connect(address: str, port: int, seconds: float = TRY_SECONDS) -> socket.socket:
    """A connection to another node. Raises NetworkError."""
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
    raise NetworkError(f"{address}:{port}: {why}")


SIOCGIFCONF, IFREQ = 0x8912, 40
"""The kernel's list of IPv4 addresses, and the bytes of one; a name's 16, then a sockaddr."""

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def interfaces() -> dict[str, list[str]]:
    """The addresses of each interface, in the kernel's order."""
    found: dict[str, list[str]] = {name: [] for _, name in socket.if_nameindex()}
    room = array.array("B", bytes(1024 * IFREQ))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        where = struct.pack("iL", len(room), room.buffer_info()[0])
        used, _ = struct.unpack("iL", fcntl.ioctl(asked, SIOCGIFCONF, where))
    for at in range(0, used, IFREQ):
        name = bytes(room[at : at + 16]).partition(b"\0")[0].decode().partition(":")[0]
        found.setdefault(name, []).append(socket.inet_ntoa(bytes(room[at + 20 : at + 24])))
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            found.setdefault(name, []).append(str(ip_address(bytes.fromhex(number))))
    return found


def plain(address: str) -> str:
    """An address as interfaces have it: of a socket of both families, and without its scope."""
    return address.partition("%")[0].removeprefix("::ffff:")


def interface_of(address: str, there: Mapping[str, Sequence[str]]) -> str:
    """The interface with an address; "" where none has it."""
    return next((name for name, its in there.items() if plain(address) in its), "")


def chosen(variable: str, value: str, there: Sequence[str]) -> list[str]:
    """The interfaces that a variable names: gloo's whole names, NCCL's beginnings; ^ all others."""
    names = value.removeprefix("^").removeprefix("=").split(",")
    whole = variable == GLOO or value.lstrip("^").startswith("=")
    fits = [one for one in there if any(one == n if whole else one.startswith(n) for n in names)]
    return [one for one in there if one not in fits] if value.startswith("^") else fits


def misled(
    used: str, there: Mapping[str, Sequence[str]], environ: Mapping[str, str], mine: str
) -> Iterator[tuple[str, str]]:
    """The variables by which ranks wouldn't find those of the other nodes, and why.

    `used` is the interface by which nodes reach each other, `mine` the address of this machine's
    own name, which gloo takes by default; NCCL leaves out lo and docker's.
    """
    for name in (GLOO, NCCL):
        if value := environ.get(name):
            if used not in (takes := chosen(name, value, list(there))):
                yield name, f"{name}={value} means {', '.join(takes) or 'none of this machine'}"
        elif name == GLOO and (found := interface_of(mine, there)) != used:
            yield name, f"gloo would take {found or 'none'}, which this machine's name stands for"
        elif name == NCCL and first_of_nccl(there) not in ("", used):
            yield name, f"NCCL would take {first_of_nccl(there)} first"


def first_of_nccl(there: Mapping[str, Sequence[str]]) -> str:
    """The interface that NCCL takes by itself: the first with an address, but lo and docker's.

    "" where there is InfiniBand's, by which it goes, or none.
    """
    if any(name.startswith("ib") for name in there):
        return ""
    own = (name for name, has in there.items() if has and not name.startswith(("lo", "docker")))
    return next(own, "")


def is_bridge(name: str) -> bool:
    """Whether an interface is a bridge, of which no cable leads out but by another one."""
    return Path("/sys/class/net", name, "bridge").is_dir()


def own_address() -> str:
    """What this machine's own name stands for; "" where it isn't known."""
    with suppress(OSError):
        return str(socket.getaddrinfo(socket.gethostname(), None)[0][4][0])
    return ""
