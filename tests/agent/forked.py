"""Forks ranks that have imported torch and Megatron, which most of a short run's time goes to.

A script for `conftest.start`: for each line in, with a program and its ranks' variables, a line
out, with the exit code that the runner would have. It is no runner: nobody can ask it to stop.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import sys
import time
from typing import Any

from launcher.agent import compat, cpu, script
from launcher.agent.ranks import rank

FAST = "launcher.trainer.fast"
SETTLE_SECONDS = 1.0
"""How long ranks that outlive a failed one have to say why."""


def imported() -> None:
    """All that ranks import, after the redirection as `-m launcher.agent.cpu` has it."""
    compat.trust_checkpoints()
    cpu.install()
    compat.prepare()
    importlib.import_module("torch._dynamo")
    importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    if importlib.util.find_spec(FAST):  # it is optional
        importlib.import_module(f"{FAST}.trainer")


def become(parent: int, output: str, folder: str, variables: dict[str, str]) -> None:
    """A rank in this process, which ends with its parent."""
    rank.end_with_parent()
    if os.getppid() != parent:
        os._exit(1)
    files = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_APPEND)
    for number, file in enumerate((*files, files[1])):
        os.dup2(file, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:1] = [folder, *variables["PYTHONPATH"].split(os.pathsep)]
    cpu.write_whole_lines()


def ended(ranks: set[int]) -> int:
    """Wait for them; the exit code of the first that failed, the shell's, or 0."""
    first = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not first:
            first = 128 - code if code < 0 else code
            time.sleep(SETTLE_SECONDS)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return first


def main() -> None:
    imported()
    gc.freeze()
    parent = os.getpid()
    while line := sys.stdin.readline():
        asked: dict[str, Any] = json.loads(line)
        ranks = set()
        for variables in asked["ranks"]:
            if not (pid := os.fork()):
                become(parent, asked["output"], asked["folder"], variables)
                return script.run(asked["program"])
            ranks.add(pid)
        print(ended(ranks), flush=True)


if __name__ == "__main__":
    main()
