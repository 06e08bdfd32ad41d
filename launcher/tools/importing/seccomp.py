"""A seccomp filter for scripts: of the kernel, they get what bash and its tools need."""

from __future__ import annotations

import errno
import os
import struct

NUMBERS = {
    "x86_64": (0xC000003E, (41, 165, 248, 249, 250, 272, 308), (90, 91, 268, 188, 189, 190)),
    "aarch64": (0xC00000B7, (198, 40, 217, 218, 219, 97, 268), (52, 53, 5, 6, 7)),
}
"""By machine: its AUDIT_ARCH; its numbers of socket, mount, add_key, request_key, keyctl, unshare
and setns, which are refused; and those of chmod and setxattr, which do nothing. A socket of the
host's that lies in a folder takes orders also where the folder is read-only, keys are the user's in
any namespace, and /dev/null is the host's: root could take it from all others."""

EVERYWHERE = (425, 428, 429, 430, 432, 442)
"""io_uring_setup, open_tree, move_mount, fsopen, fsmount, mount_setattr: alike on all machines."""
PRETENDED = (452, 463, 469)
"""fchmodat2, setxattrat, file_setattr, likewise."""

FOREIGN = 0x40000000
"""From here on numbers are those of x32, which would pass."""

LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
PRETEND, REFUSE = 0x00050000, 0x00050000 | errno.EPERM


def program() -> bytes:
    """The filter of this machine as `bwrap --seccomp` takes it. Raises KeyError for others."""
    arch, refused, pretended = NUMBERS[os.uname().machine]
    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, arch), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    lines += [(AT_LEAST, 0, 1, FOREIGN), (RETURN, 0, 0, REFUSE)]
    answers = [(one, REFUSE) for one in (*refused, *EVERYWHERE)]
    for number, answer in answers + [(one, PRETEND) for one in (*pretended, *PRETENDED)]:
        lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, answer)]
    lines += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
