"""Starts a local run's process and stays with it: its output and exit code outlive the launcher."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from launcher import files

PROCESS, STDOUT, STDERR, CODE = "process.json", "stdout", "stderr", "code"
PAUSE_SECONDS = 0.005
ROOM = 16
"""Bytes that are kept free for the exit code."""

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
    out, passes_out = _passed_on(folder / STDOUT)
    err, passes_err = _passed_on(folder / STDERR, out)
    passing = {passes_out, passes_err}
    files.write(folder / CODE, " " * ROOM, 0o600)  # the disk may be full at the end
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
    while (left := {*_children()} - passing) or passing:
        _end(left)
        passing = {pid for pid in passing if left or os.waitpid(pid, os.WNOHANG)[0] == 0}
        time.sleep(0 if left else PAUSE_SECONDS)
    with open(files.open_own(folder / CODE, os.O_WRONLY), "wb", buffering=0) as file:
        file.write(str(128 - code if code < 0 else code).ljust(ROOM).encode())


def _passed_on(path: Path, *others: int) -> tuple[int, int]:
    """A pipe, and the process that writes what comes of it to a file, and outlives this one.

    That has none of the `others`, whose readers wait for their end. What a full disk doesn't take
    is lost, and the run goes on: by itself it would end with an error as it writes a line.
    """
    target = files.open_own(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    source, sink = os.pipe()
    if pid := os.fork():
        os.close(source)
        os.close(target)
        return sink, pid
    for handle in (sink, *others):
        os.close(handle)
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    lost, why = 0, ""
    while data := os.read(source, 1 << 16):
        if lost:
            data = f"\nlauncher: {lost} bytes of output were lost here: {why}\n".encode() + data
        try:
            while data:
                data = data[os.write(target, data) :]
            lost = 0
        except OSError as error:
            lost, why = lost + len(data), os.strerror(error.errno or 0)
    os._exit(0)


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


def _end(children: Iterable[int]) -> None:
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
