"""The kernel's counters of processes killed for memory, and what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.train.ranks import oom
from launcher.train.ranks.oom import LIMIT, MACHINE, Counters

EVENTS = "low 0\nhigh 0\nmax 12\noom {oom}\noom_kill {oom_kill}\noom_group_kill 0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {oom_kill}\n"
VMSTAT = "nr_free_pages 1\noom_kill {oom_kill}\npgfault 4\n"


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
    write(tmp_path / "sys/fs/cgroup" / group / "memory.events", EVENTS.format(oom=3, oom_kill=2))
    write(tmp_path / "proc/vmstat", VMSTAT.format(oom_kill=5))
    assert oom.read(tmp_path) == Counters(group=2, limit=True, machine=5)


@pytest.mark.parametrize("inside", [True, False])
def test_version_1(tmp_path: Path, inside: bool) -> None:
    """A container sees the host's path in /proc and its own group at the mount's root."""
    group = "docker/abc"
    write(tmp_path / "proc/self/cgroup", f"5:cpu,cpuacct:/x\n4:memory:/{group}\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/memory" / ("" if inside else group)
    write(folder / "memory.oom_control", CONTROL.format(oom_kill=1))
    write(folder / "memory.limit_in_bytes", "1000\n")
    write(folder / "memory.max_usage_in_bytes", "1000\n")
    assert oom.read(tmp_path) == Counters(group=1, limit=True)
    write(folder / "memory.max_usage_in_bytes", "999\n")
    assert oom.read(tmp_path) == Counters(group=1, limit=False)


def test_nothing_to_read(tmp_path: Path) -> None:
    assert oom.read(tmp_path) == Counters()


def test_here() -> None:
    """The kernel that runs this test has counted for itself."""
    found = oom.read()
    assert found.machine == oom.value(Path("/proc/vmstat").read_text(), "oom_kill")
