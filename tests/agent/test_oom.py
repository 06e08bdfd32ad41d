"""The kernel's counters of processes killed for memory, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.agent.ranks import oom
from launcher.agent.ranks.oom import LIMIT, MACHINE, Counters

EVENTS = "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (Counters(1, True, 7), ""),
        (Counters(2, True, 8), LIMIT),
        (Counters(2, False, 8), MACHINE),
        (Counters(1, True, 8), MACHINE),
    ],
)
def test_blame(after: Counters, why: str) -> None:
    assert oom.blame(Counters(1, False, 7), after) == why


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize("inside", [True, False])
def test_version_2(tmp_path: Path, inside: bool) -> None:
    group = "" if inside else "user.slice/run"
    write(tmp_path / "proc/self/cgroup", f"0::/{group}\n")
    write(tmp_path / "sys/fs/cgroup" / group / "memory.events", EVENTS)
    write(tmp_path / "proc/vmstat", "nr_free_pages 1\noom_kill 5\npgfault 4\n")
    assert oom.read(tmp_path) == Counters(group=2, limit=True, machine=5)


@pytest.mark.parametrize("inside", [True, False])
def test_version_1(tmp_path: Path, inside: bool) -> None:
    """A container sees the host's path in /proc and its own group at the mount's root."""
    assert oom.read(tmp_path) == Counters()
    write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory" / ("" if inside else "docker/abc")
    write(folder / "memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    write(folder / "memory.limit_in_bytes", "1000\n")
    for most, limit in (("1000", True), ("999", False)):
        write(folder / "memory.max_usage_in_bytes", f"{most}\n")
        assert oom.read(tmp_path) == Counters(group=1, limit=limit)


def test_here() -> None:
    """The kernel that runs this test has counted for itself."""
    assert f"\noom_kill {oom.read().machine}\n" in Path("/proc/vmstat").read_text()
