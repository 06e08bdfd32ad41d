"""Runs a command in parts as a Slurm array: submits, waits, reports failures."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from launcher.base import files, owned
from launcher.base.errors import LauncherError
from launcher.base.settings import ROOT
from launcher.runs.backends import host
from launcher.runs.backends.slurm import slurm_queue

POLL_SECONDS = 0.5
ASK_SECONDS = 5.0
LAST = 4000
"""Bytes of a failed part's output that are printed."""

SCRIPT = """\
#!/bin/bash
{options}export PYTHONPATH={root}"${{PYTHONPATH:+:$PYTHONPATH}}"
cd -- {cwd} && {command} --shard "$SLURM_ARRAY_TASK_ID/{parts}"
code=$?
echo "$code" > {folder}/"$SLURM_ARRAY_TASK_ID".end
exit "$code"
"""


class PartFailure(LauncherError):
    """A part ended with a code of its own, which is this command's too."""

    def __init__(self, problem: str, code: int) -> None:
        super().__init__(problem)
        self.exit_code = code


def run(
    command: Sequence[str], parts: int, options: Sequence[str], tell: Callable[[str], object]
) -> None:
    """Run `command --shard I/PARTS` for each part, and wait for all: what they write is theirs.

    options: further ones of sbatch, whole: --partition=cpu. Raises EngineError where Slurm refuses
    or loses a part, PartFailure where one fails; then no part goes on.
    """
    with owned.scratch(Path.cwd()) as folder:  # which the nodes see, as they see what is read
        told = [f"--array=1-{parts}", "--job-name=tokenize", f"--output={folder}/%a.log"]
        lines = "".join(f"#SBATCH {shlex.quote(one)}\n" for one in [*told, *options])
        text = SCRIPT.format(
            options=lines,
            root=shlex.quote(str(ROOT)),
            cwd=shlex.quote(os.getcwd()),
            command=shlex.join(command),
            parts=parts,
            folder=shlex.quote(str(folder)),
        )
        files.write(folder / "job.sh", text, 0o700)
        job = slurm_queue.submit(str(folder / "job.sh"))
        tell(f"Slurm job {job}: {parts} parts")
        try:
            _wait(job, folder, parts, tell)
        finally:
            slurm_queue.cancel(job)


def _wait(job: str, folder: Path, parts: int, tell: Callable[[str], object]) -> None:
    """Wait for how each ended; one that Slurm knows no more has some time yet to be read.

    Files of a shared disk may come later than the queue's answer.
    """
    queue, missing = slurm_queue.Queue(), [*range(1, parts + 1)]
    asked_at, gone = time.monotonic(), 0
    while missing:
        for part in [*missing]:
            code = host.number(folder / f"{part}.end")
            if code == 0:
                missing.remove(part)
                tell(f"part {part} of {parts} is done, {len(missing)} to come")
            elif code is not None or gone > 1:
                how = "was ended by Slurm" if code is None else f"failed with exit code {code}"
                log = _last(folder / f"{part}.log")
                raise PartFailure(f"part {part} of {parts} {how}:\n{log}", code or 1)
        if time.monotonic() - asked_at >= ASK_SECONDS:
            going = queue.state(job)[0] in slurm_queue.GOES_ON
            asked_at, gone = time.monotonic(), 0 if going else gone + 1
        time.sleep(POLL_SECONDS)


def _last(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes()[-LAST:].decode(errors="replace").strip()
    return "it wrote nothing"
