"""Disks that are soon full."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UNLIMITED = resource.getrlimit(resource.RLIMIT_FSIZE)


@contextmanager
def limited(size: int) -> Iterator[None]:
    """Let no file of this process, or of those that it starts meanwhile, have more bytes."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, UNLIMITED[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)


@contextmanager
def mounted(path: Path, size: int) -> Iterator[None]:
    """A disk of that size at `path`, which only root can have."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(path)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)
