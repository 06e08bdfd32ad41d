"""Runs a script, or `-m MODULE`, as `python3` would, in a process that is already prepared."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence


def run(argv: Sequence[str]) -> None:
    """Run what `argv` begins with as `__main__`; the rest are its arguments."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
        for name in [name for name in sys.modules if name.partition(".")[0] == "launcher"]:
            del sys.modules[name]  # a script may have a package of that name
        runpy.run_path(argv[0], run_name="__main__")
