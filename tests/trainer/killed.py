"""Train by launcher.trainer.gpt, and be killed as iteration 4's checkpoint is half written."""

from __future__ import annotations

import functools
import os
import signal
import sys
from typing import Any

from launcher.agent import compat
from launcher.agent.ranks import exit_codes
from launcher.trainer.gpt import __main__ as gpt

WRITTEN = 3
"""Tensors, of some thirty."""

WRITER = "KILL_WRITER"
"""The variable that lets the process alone be killed that writes beside training."""


def main() -> int:
    """Never returns where the checkpoint is written."""
    compat.prepare()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    write, left = filesystem_async._write_item, [WRITTEN]

    @functools.wraps(write)
    def dying(*args: Any, **kwargs: Any) -> Any:
        left[0] -= any("iter_0000004" in str(getattr(each, "name", "")) for each in args)
        if not left[0]:
            writer = os.getppid() if WRITER in os.environ else 0  # 0: its group, the rank's
            os.kill(writer, signal.SIGKILL)
        return write(*args, **kwargs)

    filesystem_async._write_item = dying
    return gpt.main(sys.argv[1:])


if __name__ == "__main__":
    exit_codes.leave(main())
