"""Finds out from kernel counters whether a process was killed for lack of memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LIMIT = "out of memory (the container's limit)"
MACHINE = "out of memory (the machine's memory)"


@dataclass(frozen=True)
class Counters:
    """What has been counted since the start of this process's cgroup, and of the machine.

    group: processes of the cgroup that were killed, by whatever out-of-memory killer; limit:
    whether the cgroup has met its own limit; machine: processes killed anywhere.
    """

    group: int = 0
    limit: bool = False
    machine: int = 0


def blame(before: Counters, after: Counters) -> str:
    """Why the kernel killed a process between the two, or "" where it didn't."""
    if after.group > before.group:
        return LIMIT if after.limit else MACHINE
    return MACHINE if after.machine > before.machine else ""


def read(root: Path = Path("/")) -> Counters:
    """The counters now; what can't be read is 0. /proc/self/cgroup has the group's path.

    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files
    https://docs.kernel.org/admin-guide/cgroup-v1/memory.html
    """
    groups = _text(root / "proc/self/cgroup")
    two = _group(groups, r"^0::/(.*)$")
    one = _group(groups, r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$")
    v1 = {
        name: _first(root / "sys/fs/cgroup/memory", one, f"memory.{name}")
        for name in ("oom_control", "max_usage_in_bytes", "limit_in_bytes")
    }
    events = _first(root / "sys/fs/cgroup", two, "memory.events")
    most, limit = v1["max_usage_in_bytes"], v1["limit_in_bytes"]
    return Counters(
        group=value(events or v1["oom_control"], "oom_kill"),
        limit=value(events, "oom") > 0 or bool(most and limit and int(most) >= int(limit)),
        machine=value(_text(root / "proc/vmstat"), "oom_kill"),
    )


def value(text: str, name: str) -> int:
    """The number that stands behind a name at the start of a line; 0 where there is none."""
    return int(_group(text, rf"^{name} (\d+)$") or 0)


def _group(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else ""


def _first(mount: Path, group: str, name: str) -> str:
    """Inside a container, the mount's root is the container's own group."""
    return _text(mount / group / name) or _text(mount / name)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
