"""Lets a rank write its Python stacks on SIGUSR2, even inside a collective, and reads them."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.agent import diverged, script

SIGNAL = signal.SIGUSR2
"""SIGUSR1 is what clusters announce a preemption with."""

FOLDER = "LAUNCHER_STACKS"
"""The variable that names the folder of the ranks' files."""

FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')
HEADING = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
LIBRARY = re.compile(
    r"^<|/(?:(?:site|dist)-packages|lib|pytorch)/(?:torch|numpy|_pytest|transformer_engine|apex)/"
    r"|/lib(?:64)?/python3\.\d+/(?!(?:site|dist)-packages/)"
    r"|/launcher/agent/(?:ranks/stacks|checkout|script|cpu|compat|start)\.py$"
)
"""The paths of code that a program only passes through: torch, the standard library, this."""


@dataclass(frozen=True)
class Frame:
    """A function that was being run: its file, the line in it (0 where unknown), its name."""

    file: str
    line: int
    function: str

    @property
    def place(self) -> str:
        """The file's name and the line, as people read them."""
        return f"{os.path.basename(self.file)}:{self.line}"

    @property
    def is_library(self) -> bool:
        """Whether it is torch's, the standard library's, or what starts a rank."""
        return bool(LIBRARY.search(self.file))


Stack = tuple[Frame, ...]
"""The frames of a thread, the innermost first."""


def path(folder: str | Path, rank: int | str) -> Path:
    """The file that a rank writes its stacks to."""
    return Path(folder) / f"rank-{rank}.stack"


def parse(text: str) -> list[Stack]:
    """The threads' stacks in what faulthandler wrote, in its order; other lines are left out.

    https://docs.python.org/3/library/faulthandler.html has the format by an example.
    """
    threads = list[list[Frame]]()
    for line in text.splitlines():
        if HEADING.match(line):
            threads.append([])
        elif (found := FRAME.match(line)) and threads:
            number = int(found[2]) if found[2].isdecimal() else 0
            threads[-1].append(Frame(found[1], number, found[3]))
    return [tuple(thread) for thread in threads]


def main_thread(threads: Sequence[Stack]) -> Stack:
    """The one that runs the program: all others begin in a function of threading.

    Where no thread shows its beginning, since more than 100 frames aren't written, it is the
    last one: threads are written from the youngest to the oldest.
    """
    roots = ("<module>", "_run_module_as_main")
    begun = [thread for thread in threads if thread and thread[-1].function in roots]
    return [(), *threads, *begun][-1]


def register(environ: dict[str, str] | os._Environ[str]) -> None:
    """Write all threads' stacks to the rank's file on each SIGUSR2, and to stderr on a crash.

    The handlers are C functions: they need neither the interpreter's lock nor the main thread.
    """
    faulthandler.enable()
    if folder := environ.get(FOLDER):
        file = os.open(path(folder, environ["RANK"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
        diverged.note(environ, folder)


def main(argv: Sequence[str]) -> None:
    """Run a script, or `-m MODULE`, as `__main__` with the handlers installed."""
    register(os.environ)
    script.run(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
