"""A seccomp filter for scripts: of the kernel, they get what bash and its tools need."""

from __future__ import annotations

import errno
import os
import struct

NUMBERS = {
    "x86_64": (0xC000003E, (41, 165, 248, 249, 250, 272, 308)),
    "aarch64": (0xC00000B7, (198, 40, 217, 218, 219, 97, 268)),
}
"""By machine: its AUDIT_ARCH, and its numbers of socket, mount, add_key, request_key, keyctl,
unshare and setns. A socket of the host's that lies in a folder takes orders also where the folder
is read-only, and keys are the user's in any namespace."""

EVERYWHERE = (425, 428, 429, 430, 432, 442)
"""io_uring_setup, open_tree, move_mount, fsopen, fsmount, mount_setattr: alike on all machines."""

FOREIGN = 0x40000000
"""From here on numbers are those of x32, which would pass."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, REFUSE, KILL = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000


def program() -> bytes:
    """The filter of this machine as `bwrap --seccomp` takes it. Raises KeyError for others."""
    arch, own = NUMBERS[os.uname().machine]
    refused = (*own, *EVERYWHERE)
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    lines += [(AT_LEAST, len(refused) + 1, 0, FOREIGN)]
    lines += [(EQUAL, len(refused) - at, 0, number) for at, number in enumerate(refused)]
    lines += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
