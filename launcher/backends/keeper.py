"""Starts a local run's process and stays with it: its output and exit code outlive the launcher."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launcher import files

PROCESS, STDOUT, STDERR, CODE = "process.json", "stdout", "stderr", "code"
FILES = (PROCESS, STDOUT, STDERR, CODE)
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT, STATE, STARTED = 1, 0, 19
"""Where these stand in /proc/PID/stat behind the command's name (man 5 proc_pid_stat)."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""linux/prctl.h"""


def keep(folder: Path, labels: Mapping[str, str], argv: list[str]) -> None:
    """Run `argv` with its output in `folder`; afterwards the exit code is there too.

    Of what `argv` started nothing is left then. Where this process is killed, `argv` is asked to
    stop. Raises OSError where it doesn't start.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for signum in SIGNALS:  # where a whole group is asked to stop, the run is as well
        signal.signal(signum, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher holds them as it starts a run
    new = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    out, err = (files.open_own(folder / name, new) for name in (STDOUT, STDERR))
    with open(out, "wb"), open(err, "wb"):
        process = subprocess.Popen(
            argv,
            stdout=out,
            stderr=err,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    here = {"machine": machine(), "keeper": identity(os.getpid())}
    told = {**here, "process": identity(process.pid), "labels": labels}
    files.write(folder / PROCESS, json.dumps(told), 0o600)
    code = process.wait()
    while left := _children():
        _end(left)
    files.write(folder / CODE, str(128 - code if code < 0 else code), 0o600)


def machine() -> str:
    """The name of the machine, on which alone the numbers of processes mean something."""
    return os.uname().nodename


def identity(pid: int) -> tuple[int, str]:
    """A process, told from any later one of its number by its start, in the kernel's ticks."""
    return pid, _stat(pid)[STARTED]


def alive(process: tuple[int, str]) -> bool:
    """Whether that very process goes on."""
    with suppress(OSError):
        fields = _stat(process[0])
        return fields[STARTED] == process[1] and fields[STATE] != "Z"
    return False


def held(process: tuple[int, str]) -> bool:
    """Whether a signal, such as SIGSTOP, holds that process."""
    with suppress(OSError):
        return _stat(process[0])[STATE] in ("T", "t")
    return False


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _children() -> list[int]:
    """The processes that this one is the parent of, those included that it has inherited."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _stat(int(path.name))[PARENT] == str(os.getpid()):
                found.append(int(path.name))
    return found


def _end(children: list[int]) -> None:
    for pid in children:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(argv: list[str]) -> None:
    """Keep a run; what can't be started is told in one line."""
    folder, labels, *command = argv
    try:
        keep(Path(folder), json.loads(labels), command)
    except OSError as error:
        sys.exit(f"{error.filename or command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
