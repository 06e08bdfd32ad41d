"""Starts a rank's command, which the kernel kills when its parent dies."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; it stays in force through exec


def end_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(runner: str, *command: str) -> None:
    """Run the command in this process's place; `runner` is the process id of the parent.

    Or a file for this process's own, where a tracer is the parent, which the runner started. The
    kernel watches the thread that started this process: the runner's main one, which lives
    as long as the runner does. Where there is no such call, the rank runs all the same.
    """
    end_with_parent()
    if not runner.isdigit():
        with open(runner, "w", encoding="ascii") as file:
            file.write(str(os.getpid()))
    elif os.getppid() != int(runner):  # it ended before the call
        return
    os.execv(command[0], command)  # noqa: S606


if __name__ == "__main__":
    main(*sys.argv[1:])
