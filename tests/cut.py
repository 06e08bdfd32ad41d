"""Runs a function in a child that is killed, or told of an error, at its Nth change of a file."""

from __future__ import annotations

import ctypes
import os
import platform
import signal
from collections.abc import Callable, Iterator

from launcher.base.errors import LauncherError

CALLS = {
    1: "write", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync", 76: "truncate",
    77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 86: "link", 87: "unlink",
    88: "symlink", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat",
    265: "linkat", 266: "symlinkat", 316: "renameat2", 326: "copy_file_range", 40: "sendfile",
}  # fmt: skip
"""x86-64's numbers; openat too, as it makes files."""

TRACEME, PEEKUSER, POKEUSER, SYSCALL, SETOPTIONS = 0, 3, 6, 24, 0x4200
SYSGOOD, EXITKILL = 1, 0x100000
RAX, ORIG_RAX, NONE = 10 * 8, 15 * 8, 2**64 - 1
REFUSED = 3
"""The child's exit code where the function has raised what a command tells in one line."""
unsupported = "" if platform.machine() == "x86_64" else "system calls are known of x86-64 alone"


def cuts(work: Callable[[], object], error: int = 0) -> Iterator[list[str]]:
    """Kill `work` before its first such call, its second, and so on, until it runs to its end.

    With `error` the call isn't made and ends with that number, and `work` goes on. Each time what
    it had called is given, for the caller to look at what is left; the caller makes things as they
    were before going on. At the end, all of it.
    """
    number = 1
    while True:
        called, ended = _cut(work, number, error)
        yield called
        if ended:
            return
        number += 1


def _cut(work: Callable[[], object], number: int, error: int) -> tuple[list[str], bool]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    child = os.fork()
    if child == 0:
        code = 70
        try:
            libc.ptrace(TRACEME, 0, None, None)
            os.kill(os.getpid(), signal.SIGSTOP)
            work()
            code = 0
        except (OSError, LauncherError):
            code = REFUSED
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    libc.ptrace(SETOPTIONS, child, None, SYSGOOD | EXITKILL)
    called: list[str] = []
    entering, deliver, failing = True, 0, False
    while True:
        libc.ptrace(SYSCALL, child, None, deliver)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            met = len(called) >= number
            good = (0, REFUSED) if error and met else (0,)
            assert os.WEXITSTATUS(status) in good, f"it failed after {called}"
            return called, not met
        assert os.WIFSTOPPED(status), f"it was killed by another: {status}"
        deliver = 0
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            deliver = os.WSTOPSIG(status)
            continue
        name = CALLS.get(libc.ptrace(PEEKUSER, child, ORIG_RAX, None)) if entering else None
        if failing and not entering:
            libc.ptrace(POKEUSER, child, RAX, NONE + 1 - error)
            failing = False
        entering = not entering
        if name:
            if len(called) + 1 == number and error:
                failing = True
                libc.ptrace(POKEUSER, child, ORIG_RAX, NONE)
            elif len(called) + 1 == number:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return called, False
            called.append(name)
