"""Runs a command or a shell in an image, with the files and GPUs of a run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace

from launcher.runs.backends import backend
from launcher.runs.follow import run_files
from launcher.runs.follow.assemble import NO_PROGRAM, assemble, new_stamp
from launcher.runs.plan.program import CHECKOUT
from launcher.runs.runfile.origins import Origin, RunRequest, made

PYTHONPATH = "/opt/megatron/lib:/opt/packages/lib"
"""As images have it."""


def shell(image: str, backend_name: str, gpus: str, source: str | None, argv: list[str]) -> int:
    """Open a shell, or run `argv`, in an image; the working folder is seen at /work."""
    values: dict[str, object] = {"name": "shell", "resources": {"workdir": "."}}
    if source:
        values |= {"source": source, "env": {"PYTHONPATH": f"{CHECKOUT}:{PYTHONPATH}"}}
    return in_image(image, backend_name, gpus, values, argv).returncode


def in_image(
    image: object,
    backend_name: str,
    gpus: str,
    values: Mapping[str, object],
    argv: list[str],
    stdout: int | None = None,
    *,
    by_payload: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `argv` in an image to its end; `values` are more keys of the run file that it has not.

    by_payload: it is a part of the payload with its arguments: runner --cpu
    """
    chosen = backend(backend_name)
    values = {"image": image, "gpus": gpus, "program": NO_PROGRAM, **values}
    asked = RunRequest(made({**values}, "shell"), Origin("shell", {}, {}), os.getcwd())
    plan = assemble(asked, chosen, new_stamp()).plan
    mounts = tuple(mount for mount in plan.mounts if mount.key != "program")
    before = plan.argv[:2] if by_payload else ()
    plan = replace(plan, argv=(*before, *argv), mounts=mounts)
    if not (by_payload or chosen.shares_files):
        plan = plan.without_payload()
    run_files.require(plan)
    run_files.prepare(plan)
    return subprocess.run(chosen.shell(plan), env=chosen.environment(), stdout=stdout, text=True)
