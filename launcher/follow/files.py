"""The files and folders of the host that a plan needs: looks for them, makes those written to."""

from __future__ import annotations

import os
from pathlib import Path

from launcher.errors import UsageError
from launcher.plan.caller import make_folder
from launcher.plan.plan import Mount, Plan


def missing(plan: Plan) -> list[str]:
    """One line for every file or folder that the run reads and that isn't there."""
    return [
        f"{mount.key}: no such file or folder: {mount.source}"
        for mount in plan.mounts
        if mount.read_only and not Path(mount.source).exists()
    ]


def require(plan: Plan) -> None:
    """Raises UsageError where something that the run reads isn't there."""
    lacking = missing(plan)
    if lacking:
        by_prefix = any(line.startswith("data.path") for line in lacking)
        remedy = "data.path is the path without .bin and .idx." if by_prefix else ""
        raise UsageError("\n".join(lacking), remedy)


def prepare(plan: Plan) -> None:
    """Make the folders the run writes to, as the calling user. Raises UsageError."""
    for mount in plan.mounts:
        if not mount.read_only:
            _make_folder(mount)


def _make_folder(mount: Mount) -> None:
    try:
        if not os.path.exists(mount.source):  # a mount of the user's own may be a file
            make_folder(Path(mount.source))
    except OSError as error:
        raise UsageError(
            f"{mount.key}: can't make the folder {mount.source}: {error.strerror}",
            "Give a folder you may write to.",
        ) from error
    if mount.key != "mounts" and not os.path.isdir(mount.source):
        raise UsageError(
            f"{mount.key}: {mount.source} is a file, and has to be a folder",
            "Give another folder.",
        )
    if not os.access(mount.source, os.W_OK):
        raise UsageError(
            f"{mount.key}: {mount.source} isn't yours to write to",
            "Give another folder, or change its owner.",
        )
