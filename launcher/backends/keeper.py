"""Starts a local run's process and stays with it: its output and exit code outlive the launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

PROCESS, STDOUT, STDERR, CODE = "process.json", "stdout", "stderr", "code"
FILES = (PROCESS, STDOUT, STDERR, CODE)


def keep(folder: Path, labels: dict[str, str], argv: list[str]) -> None:
    """Run `argv` with its output in `folder`; afterwards the exit code is there too."""
    with (folder / STDOUT).open("wb") as out, (folder / STDERR).open("wb") as err:
        process = subprocess.Popen(argv, stdout=out, stderr=err)
    told = {"pid": process.pid, "started": started(process.pid), "labels": labels}
    write(folder / PROCESS, json.dumps(told))
    code = process.wait()
    write(folder / CODE, str(128 - code if code < 0 else code))


def started(pid: int) -> str:
    """When a process was started, in the kernel's ticks, which tells it from a later one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    fields = stat.rpartition(")")[2].split()
    return "" if fields[0] == "Z" else fields[19]


def write(path: Path, text: str) -> None:
    """Write a file that nobody sees half of."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def main(argv: list[str]) -> NoReturn:
    folder, labels, *command = argv
    keep(Path(folder), json.loads(labels), command)
    sys.exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
