"""What nvidia-smi tells of this machine's GPUs and of who uses them."""

from __future__ import annotations

import csv
import re
import subprocess

from launcher.machine.machine import Gpu, Use

GPU_FIELDS = "index,uuid,name,memory.total,memory.used,compute_cap,driver_version"
USE_FIELDS = "gpu_uuid,pid,used_memory"


def gpus() -> tuple[Gpu, ...] | None:
    """The driver's GPUs; empty where it has none, None where there is no driver to ask."""
    rows = _ask(f"--query-gpu={GPU_FIELDS}")
    if rows is None:  # older drivers know no compute_cap
        rows = _ask(f"--query-gpu={GPU_FIELDS.replace('compute_cap,', '')}")
        rows = None if rows is None else [[*row[:5], "", *row[5:]] for row in rows]
    if rows is None:
        return None
    return tuple(_gpu(row) for row in rows if len(row) == 7 and row[0].isdecimal())


def uses() -> tuple[Use, ...]:
    """The processes that compute on them, as far as the driver tells."""
    rows = _ask(f"--query-compute-apps={USE_FIELDS}") or []
    return tuple(
        Use(row[0], int(row[1]), _bytes(row[2]))
        for row in rows
        if len(row) == 3 and row[1].isdecimal()
    )


def _gpu(row: list[str]) -> Gpu:
    index, uuid, name, total, used, capability, driver = row
    found = re.fullmatch(r"(\d+)\.(\d+)", capability)
    return Gpu(
        index=int(index),
        uuid=uuid,
        name=name,
        total=_bytes(total) or 0,
        used=_bytes(used) or 0,
        capability=(int(found[1]), int(found[2])) if found else None,
        driver=driver,
    )


def _bytes(mebibytes: str) -> int | None:
    """Bytes of nvidia-smi's MiB; None for its '[N/A]'."""
    return int(mebibytes) << 20 if mebibytes.isdecimal() else None


def _ask(query: str) -> list[list[str]] | None:
    argv = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return [] if "No devices were found" in done.stdout + done.stderr else None
    lines = csv.reader(done.stdout.splitlines(), skipinitialspace=True)
    return [[field.strip() for field in row] for row in lines]
