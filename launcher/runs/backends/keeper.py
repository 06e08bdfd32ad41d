"""Starts a local run's process and keeps its output and exit code when the launcher ends.

The output goes through a process of its own, the pump, which outlives the keeper: what the disk of
the records doesn't take is lost, and the run goes on.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launcher.base import files
from launcher.base.logfile import LogFile, keep_room

PROCESS, STDOUT, STDERR, CODE, LOST = "process.json", "stdout", "stderr", "code", "lost"
FILES = (PROCESS, STDOUT, STDERR, CODE, LOST)
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
ROOM = 256
"""Bytes of the disk that are kept for the exit code, and for the report of lost output."""

CHUNK = 1 << 20
"""At least what a pipe holds."""

POLL_SECONDS = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
PARENT, STATE, STARTED = 1, 0, 19
"""Where these stand in /proc/PID/stat behind the command's name (man 5 proc_pid_stat)."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""linux/prctl.h"""


def run_command(folder: Path, labels: Mapping[str, str], argv: list[str]) -> None:
    """Run `argv` with its output in `folder`; afterwards the exit code is there too.

    Of what `argv` started nothing is left then. Where this process is killed, `argv` is asked to
    stop. Raises OSError where it doesn't start.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for signum in SIGNALS:  # where a whole group is asked to stop, the run is as well
        signal.signal(signum, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # a launcher holds them as it starts a run
    code_file = _with_room(folder / CODE)
    pump = Pump(folder)
    process = subprocess.Popen(
        argv,
        stdout=pump.sinks[0],
        stderr=pump.sinks[1],
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
    )
    pump.start(identity(process.pid))
    here = {"machine": machine(), "keeper": identity(os.getpid()), "pump": identity(pump.pid)}
    told = {**here, "process": identity(process.pid), "labels": labels}
    try:
        files.write(folder / PROCESS, json.dumps(told), 0o600)
    except OSError:
        process.kill()
        raise
    code = process.wait()
    while left := _children() - {pump.pid}:
        _end(left)
    pump.end()
    with open(code_file, "wb") as file:
        file.write(b"%d" % (128 - code if code < 0 else code))
        file.flush()
        os.fsync(code_file)


def _with_room(path: Path) -> int:
    """A new file that a full disk can't keep from being written to. Raises OSError."""
    handle = files.open_own(path, NEW)
    with files.named(path):
        keep_room(handle, ROOM)
    return handle


class Pump:
    """A process that writes what comes out of two pipes to the run's files.

    It never waits for the end of a pipe, which what a run leaves behind may hold open: it ends when
    the keeper says so or, with the keeper gone, when the run's process has ended.
    """

    def __init__(self, folder: Path) -> None:
        self.logs = {name: LogFile(files.open_own(folder / name, NEW)) for name in (STDOUT, STDERR)}
        self.lost = _with_room(folder / LOST)
        self.sources, self.sinks = zip(os.pipe(), os.pipe(), strict=True)
        self.hears, self.says = os.pipe()
        self.pid = 0

    def start(self, process: tuple[int, str]) -> None:
        """Begin, for the process that writes to the pipes."""
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.dup2(1, 2)  # else the launcher, which reads it, would wait for this one, too
                for handle in (*self.sinks, self.says):
                    os.close(handle)
                self._run(process)
            finally:
                os._exit(0)
        for handle in (*self.sinks, *self.sources, self.hears):
            os.close(handle)

    def end(self) -> None:
        """Have it write what is left in the pipes, and end."""
        with suppress(BrokenPipeError):  # somebody has killed it
            os.write(self.says, b".")
        os.waitpid(self.pid, 0)

    def _run(self, process: tuple[int, str]) -> None:
        logs = dict(zip(self.sources, self.logs.values(), strict=True))
        for source in logs:
            os.set_blocking(source, False)
        keeper, over = {self.hears}, False
        while not over:
            ready, _, _ = select.select([*logs, *keeper], [], [], None if keeper else POLL_SECONDS)
            if self.hears in ready:
                over = os.read(self.hears, 1) != b""
                keeper.clear()
            over = over or not (keeper or alive(process))
            for source in [*logs] if over else {*logs} & {*ready}:
                with suppress(BlockingIOError):
                    if data := os.read(source, CHUNK):
                        self._write(logs[source], data)
                    else:
                        del logs[source]

    def _write(self, log: LogFile, data: bytes) -> None:
        before = log.error
        log.write(data)
        if before or log.error:
            errors = [(name, log.error, log.missing) for name, log in self.logs.items()]
            lost = {name: (error.strerror, missing) for name, error, missing in errors if error}
            with suppress(OSError):
                os.pwrite(self.lost, json.dumps(lost).ljust(ROOM).encode(), 0)


def machine() -> str:
    """The name of the machine, on which alone the numbers of processes mean something."""
    return os.uname().nodename


def identity(pid: int) -> tuple[int, str]:
    """A process by its number and its start, in the kernel's ticks: numbers are used again."""
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


def _children() -> set[int]:
    """The processes that this one is the parent of, those included that it has inherited."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if _stat(int(path.name))[PARENT] == str(os.getpid()):
                found.add(int(path.name))
    return found


def _end(children: set[int]) -> None:
    for pid in children:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def main(argv: list[str]) -> None:
    """Keep a run; what can't be started is reported in one line."""
    folder, labels, *command = argv
    try:
        run_command(Path(folder), json.loads(labels), command)
    except OSError as error:
        sys.exit(f"{error.filename or command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
