"""First process of a private engine's namespaces: ends the engine when its last user leaves."""

# Standard library only: it is started by path, before and outside of the launcher's imports.

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

HELLO, OTHERS_STAY = b"+", b"-"
FIRST_USER_WITHIN = 60.0
GRACE = 20.0
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1


def raise_loopback() -> None:
    """Set the loopback interface up: a new network namespace has it down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
        (flags,) = struct.unpack_from("h", answer, 16)
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))


def send(user: socket.socket, message: bytes) -> None:
    """Send to a user who may be gone."""
    with contextlib.suppress(OSError):
        user.send(message)


def count_users(listener: socket.socket) -> list[socket.socket]:
    """Return when the last user has left, with the connections of those who wait for the end.

    A user is an open connection, so one that is killed has left too.
    """
    users: set[socket.socket] = set()
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            ready = selector.select(None if users else FIRST_USER_WITHIN)
            left = [key.fileobj for key, _ in ready if key.fileobj is not listener]
            if len(left) < len(ready):
                user, _ = listener.accept()
                selector.register(user, selectors.EVENT_READ)
                users.add(user)
                send(user, HELLO)
            leavers = [user for user in users if user in left]
            users.difference_update(leavers)
            if not users:
                return leavers
            for user in leavers:
                selector.unregister(user)
                send(user, OTHERS_STAY)
                user.close()


def reap(engine: subprocess.Popen[bytes]) -> None:
    """Collect every child (orphaned shims have nobody else) and end with the engine."""
    while True:
        pid, status = os.wait()
        if pid == engine.pid:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def main(control: Path, argv: list[str]) -> None:
    """Run `argv` while anybody is connected to the socket `control`."""
    raise_loopback()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(control))
    listener.listen()
    engine = subprocess.Popen(argv)
    reaper = threading.Thread(target=reap, args=(engine,))
    reaper.start()
    signal.signal(signal.SIGTERM, lambda *_: engine.terminate())
    _waiting = count_users(listener)  # kept open: they close once all is over
    listener.close()
    control.unlink()
    engine.terminate()
    reaper.join(GRACE)
    engine.kill()
    reaper.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
