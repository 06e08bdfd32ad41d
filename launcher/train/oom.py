"""Whether the kernel killed a process for want of memory, by its counters before and after."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

LIMIT = "out of memory (the container's limit)"
MACHINE = "out of memory (the machine's memory)"


@dataclass(frozen=True)
class Counters:
    """Counts since the start of this process's cgroup, and of the machine.

    group: processes of the cgroup that were killed, by whatever out-of-memory killer; limit:
    how often the cgroup's limit was met; machine: processes killed anywhere. 0 where unknown.
    """

    group: int = 0
    limit: int = 0
    machine: int = 0


def blame(before: Counters, after: Counters) -> str:
    """Why the kernel killed a process between the two, or "" where it didn't."""
    if after.group > before.group:
        return LIMIT if after.limit > before.limit else MACHINE
    return MACHINE if after.machine > before.machine else ""


def read(root: Path = Path("/")) -> Counters:
    """The counters now. https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files"""
    groups = (root / "proc/self/cgroup").read_text() if (root / "proc/self/cgroup").exists() else ""
    new = memory_group(groups, 0)
    old = memory_group(groups, 1)
    events = _first(root / "sys/fs/cgroup", new, "memory.events")
    control = _first(root / "sys/fs/cgroup/memory", old, "memory.oom_control")
    failures = [
        _first(root / "sys/fs/cgroup/memory", old, f"memory.{name}failcnt")
        for name in ("", "memsw.")  # the latter's limit is met first where both are the same
    ]
    return Counters(
        group=value(events, "oom_kill") or value(control, "oom_kill"),
        limit=value(events, "oom") or sum(int(count or 0) for count in failures),
        machine=value(_text(root / "proc/vmstat"), "oom_kill"),
    )


def value(text: str, name: str) -> int:
    """The number that stands behind a name at the start of a line; 0 where there is none."""
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def memory_group(groups: str, version: int) -> str:
    """The path in /proc/self/cgroup that memory is counted under, without its leading slash.

    Version 2 has one line, 0::/path; version 1 one for each controller, 4:memory:/path.
    """
    pattern = r"^0::/(.*)$" if version == 0 else r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:/(.*)$"
    found = re.search(pattern, groups, re.MULTILINE)
    return found[1] if found else ""


def _first(mount: Path, group: str, name: str) -> str:
    """Inside a container, the mount's root is the container's own group."""
    return _text(mount / group / name) or _text(mount / name)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
