"""What the doctor tells of machines made up for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.machine import report
from launcher.machine.gather import SHM
from launcher.machine.machine import UNLIMITED, Machine, Use
from launcher.machine.report import Line
from launcher.plan.values import parse_gpus
from tests.machine.conftest import ENGINE, GB, card

CACHE = ("/home/user/.cache", 500 * GB)
GOOD = Machine(gpus=(card(), card(1)), engine=ENGINE, shm=64 << 30, memlock=UNLIMITED)
NO_TOOLKIT = replace(GOOD, engine=replace(ENGINE, gpus=False))
OLD = replace(GOOD, gpus=(card(name="NVIDIA GeForce RTX 3090", driver="470.57.02"),))
POOR = replace(GOOD, uses=(Use("GPU-1", 7, None),), shm=1 << 20, memlock=1 << 16)
TABLE = """\
ok       engine    27.0 at unix:///run/docker.sock, rootful, cgroup v2 (systemd)
ok       GPU 0     NVIDIA H100 80GB HBM3, 85.0 GB, compute capability 9.0
ok       GPU 1     NVIDIA H100 80GB HBM3, 85.0 GB, compute capability 9.0
warning  driver    driver 535.104.05; the image has CUDA 12.6.2
                   CUDA 12.6 came with 560.28.03; older ones carry it by minor version \
compatibility, without what is new in it.
                   → Install driver 560.28.03 or newer if something isn't supported.
ok       toolkit   the engine gives GPUs to containers
ok       /dev/shm  65536 MiB free
ok       memlock   unlimited
ok       cache     500.0 GB free for /home/user/.cache
"""


def told(machine: Machine, cuda: str | None = None, gpus: str | None = None) -> dict[str, Line]:
    found = report.lines(machine, cuda, CACHE, asked=parse_gpus(gpus) if gpus else None)
    return {line.name: line for line in found}


def states(machine: Machine, gpus: str | None = None) -> dict[str, str]:
    return {name: line.state for name, line in told(machine, gpus=gpus).items()}


def test_the_table() -> None:
    old = replace(GOOD, gpus=tuple(card(n, driver="535.104.05") for n in range(2)))
    assert report.table(report.lines(old, "12.6.2", CACHE)) == TABLE


def test_all_is_well() -> None:
    assert set(states(GOOD).values()) == {report.OK}


def test_no_gpu_is_no_fault() -> None:
    bare = replace(GOOD, gpus=None, engine=replace(ENGINE, gpus=False), shm=1, memlock=1)
    assert set(states(bare).values()) == {report.OK}
    assert told(bare)["GPUs"].found == "no GPU: CPU runs only"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("1", "gpus: 1, and the driver finds none on this machine"),
        ("all", "gpus: all, and the driver finds none"),
        ("device=0", "gpus: device=0, and the driver finds none"),
    ],
)
def test_gpus_that_are_asked_for_and_not_there_are_refused(asked: str, said: str) -> None:
    bare = replace(GOOD, gpus=None)
    assert states(bare, asked)["GPUs"] == report.REFUSED
    assert said in told(bare, gpus=asked)["GPUs"].found
    assert report.REFUSED not in states(bare, "0").values()
    assert report.REFUSED not in states(GOOD, asked).values()
    there = replace(bare, engine=replace(ENGINE, local=False))
    assert "GPUs" not in states(there, asked)  # it can't be seen from here


@pytest.mark.parametrize(
    ("machine", "cuda", "gpus", "name", "state", "mend"),
    [
        (GOOD, None, "3", "GPUs", report.REFUSED, "--gpus 2"),
        (GOOD, None, "device=0,7", "GPUs", report.REFUSED, "device=0,1"),
        (NO_TOOLKIT, None, None, "toolkit", report.REFUSED, "nvidia-ctk"),
        (OLD, "12.6", None, "driver", report.REFUSED, "560.28.03"),
        (OLD, None, None, "driver", report.OK, ""),
        (POOR, None, None, "GPU 1", report.WARNING, "Choose free ones"),
        (POOR, None, None, SHM, report.WARNING, "remount"),
        (POOR, None, None, "memlock", report.WARNING, "ulimit -l"),
        (POOR, None, None, "GPU 0", report.OK, ""),
    ],
)
def test_what_is_wrong_has_its_line(
    machine: Machine, cuda: str | None, gpus: str | None, name: str, state: str, mend: str
) -> None:
    line = told(machine, cuda, gpus)[name]
    assert line.state == state
    assert mend in line.mend


def test_what_was_not_asked_about_has_no_line() -> None:
    assert "GPUs" not in states(GOOD, "2")
    assert "toolkit" not in states(NO_TOOLKIT, "0")


def test_a_full_disk_is_a_warning() -> None:
    (line,) = [one for one in report.lines(GOOD, None, ("/c", 5)) if one.name == "cache"]
    assert line.state == report.WARNING


def test_of_an_engine_elsewhere_nothing_is_made_up() -> None:
    far = Machine(engine=replace(ENGINE, local=False, gpus=None))
    assert set(states(far)) == {"engine", "machine", "toolkit", "cache"}
