"""Shared and locked memory, and the port at which nodes meet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.machine import host
from launcher.machine.machine import UNLIMITED, Machine
from tests.machine.conftest import ENGINE, Asker

PRIVATE = "resources.ipc=private"
NODES = ("gpt3-175b", "nodes.count=16")


@pytest.mark.parametrize(
    ("sets", "shm", "refusals"),
    [
        (("gpus=2",), 1 << 30, []),
        (("gpus=2",), 1 << 29, [False]),
        (("gpus=2",), 1 << 22, [True]),
        (("gpus=2",), None, []),
        (("gpus=1",), 1 << 20, []),
        (("gpus=2", PRIVATE), 1 << 40, [False]),
        (("gpus=2", PRIVATE, "resources.shm_size=8g"), 1 << 20, []),
        (("gpus=2", PRIVATE, "resources.shm_size=4096k"), 1 << 40, [True]),
        (("gpus=0", "processes=2", "training.fp16=false"), 1 << 20, []),
    ],
)
def test_shared_memory(
    asked: Asker, sets: tuple[str, ...], shm: int | None, refusals: list[bool]
) -> None:
    findings = asked("gpt2", *sets).on(Machine(engine=ENGINE, shm=shm))
    assert [finding.refuse for finding in findings] == refusals


def test_a_private_one_has_dockers_default(asked: Asker) -> None:
    (finding,) = asked("gpt2", "gpus=2", PRIVATE).on(Machine(engine=ENGINE))
    assert "64 MiB of /dev/shm for 2 processes" in finding.what
    assert "resources.shm_size=8g" in finding.mend


def test_without_an_engine_it_is_this_machines(asked: Asker) -> None:
    findings = asked("gpt2", "gpus=2", PRIVATE).on(Machine(shm=1 << 40))
    assert findings == []


@pytest.mark.parametrize(
    ("text", "size"), [("5", 5), ("2K", 2048), ("512m", 1 << 29), ("1g", 1 << 30)]
)
def test_sizes(text: str, size: int) -> None:
    assert host.size_of(text) == size


@pytest.mark.parametrize(
    ("sets", "memlock", "warns"),
    [
        (("gpus=2",), 8 << 20, True),
        (("gpus=2",), UNLIMITED, False),
        (("gpus=2",), None, False),
        (("gpus=1",), 8 << 20, False),
        (("gpus=2", "resources.ulimits={}"), 8 << 20, False),
        (("gpus=2", "resources.ulimits={memlock: 65536}"), 8 << 20, False),
    ],
)
def test_locked_memory(
    asked: Asker, sets: tuple[str, ...], memlock: int | None, warns: bool
) -> None:
    findings = asked("gpt2", *sets).on(Machine(memlock=memlock))
    assert [finding.refuse for finding in findings] == ([False] if warns else [])


def test_a_taken_port_is_refused_on_the_first_node_alone(asked: Asker) -> None:
    (finding,) = asked(*NODES).on(Machine(engine=ENGINE, port=False))
    assert finding.what.endswith("nodes.master_port: port 29500 is taken")
    assert "nodes.master_port=29501" in finding.mend
    assert finding.refuse
    assert asked(*NODES, "nodes.rank=3").on(Machine(engine=ENGINE, port=False)) == []
    assert asked("gpt2").on(Machine(port=False)) == []


def test_a_master_that_isnt_known_is_a_warning_on_the_others(asked: Asker) -> None:
    (finding,) = asked(*NODES, "nodes.rank=3").on(Machine(engine=ENGINE, resolves=False))
    assert "node0 isn't known here" in finding.what
    assert not finding.refuse
    assert asked(*NODES).on(replace(Machine(engine=ENGINE), resolves=False)) == []
