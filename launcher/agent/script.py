"""Runs a script, or `-m MODULE`, as `python3` would, in a process that is already prepared."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of the modules that start a program."""


def run(argv: Sequence[str]) -> None:
    """Run what `argv` begins with as `__main__`; the rest are its arguments."""
    sys.excepthook = print_without_ours
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        for name in [name for name in sys.modules if name.partition(".")[0] == "launcher"]:
            del sys.modules[name]  # a script may have a package of that name
        runpy.run_path(argv[0], run_name="__main__")


def print_without_ours(
    kind: type[BaseException], error: BaseException, found: TracebackType | None
) -> None:
    """Print an error of the program as Python does, but for the frames that started the program."""
    first = found
    while first and _is_ours(first.tb_frame.f_code.co_filename):
        first = first.tb_next
    sys.__excepthook__(kind, error.with_traceback(first or found), first or found)


def _is_ours(file: str) -> bool:
    return file in ("<frozen runpy>", runpy.__file__) or os.path.abspath(file).startswith(HERE)
