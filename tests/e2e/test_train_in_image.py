"""The tests of launcher.agent that need torch and Megatron, inside images of two releases."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.base.settings import ROOT
from launcher.images.engine.connect import engine_host
from tests.e2e.command import pytest_in, tarred
from tests.e2e.registry import listener
from tests.machines import FIRST, machines_of

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

MEET = """
import torch
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
print("ranks", torch.distributed.get_world_size())
torch.distributed.destroy_process_group()
"""

LACKING = ("there is no Triton", "the distributed optimizer needs Megatron-Core")
"""What the CPU's images, or older releases, can't run: reasons of skipped tests."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("megatron", "chosen"),
    [
        ("0.16.1", "not long"),
        pytest.param("0.16.1", "long", marks=pytest.mark.long),
        pytest.param("0.10.0", "not long", marks=pytest.mark.long),
    ],
)
def test_launcher_train_passes_its_tests_in_the_image(
    engine: DockerClient, cpu_images: CpuImages, megatron: str, chosen: str
) -> None:
    from docker.types import Mount

    code, printed = pytest_in(
        engine,
        cpu_images.build(megatron),
        "tests/agent",
        "tests/trainer",
        chosen=chosen,
        workers=2 if chosen == "long" else 1,  # each imports torch twice; others work beside it
        environment={"SMALL_DISK": "/small"},
        mounts=[Mount("/small", None, type="tmpfs", tmpfs_size=1 << 20)],
    )
    assert code == 0, printed[-6000:]
    passed = re.search(r"(\d+) passed", printed)
    assert passed, printed[-2000:]
    assert int(passed[1]) >= 10
    reasons = re.findall(r"^SKIPPED \[\d+\] \S+ (.*)$", printed, re.MULTILINE)
    assert bool(reasons) == ("skipped" in printed.splitlines()[-1])
    assert all(reason.startswith(LACKING) for reason in reasons), reasons


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("file", "chosen", "workers"),
    [
        ("tests/e2e/test_local.py", "not long", 2),
        pytest.param("tests/test_docs.py", "long", 1, marks=pytest.mark.long),  # transcripts
    ],
)
def test_what_trains_by_the_command_line_passes_its_tests_in_the_image(
    engine: DockerClient, cpu_images: CpuImages, file: str, chosen: str, workers: int
) -> None:
    """This environment has no torch, so nothing else runs them."""
    code, printed = pytest_in(engine, cpu_images.build(), file, chosen=chosen, workers=workers)
    if "No module named 'pydantic_core" in printed:
        pytest.skip("this environment's Python isn't the image's")
    assert code == 0, printed[-6000:]
    assert "skipped" not in printed.splitlines()[-1]


def first_process(container: Container) -> int:
    """The container's first process as this machine numbers it: the engine may number its own."""
    wanted = re.compile(rf"^NSpid:.*\b{container.attrs['State']['Pid']}\t1$", re.M)
    for path in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # one that has ended meanwhile
            if wanted.search(path.read_text()):
                return int(path.parent.name)
    raise AssertionError(f"{container.name} has no process here")


def test_ranks_take_the_interface_by_which_their_nodes_met(
    engine: DockerClient, image: str
) -> None:
    """Two containers with a cable: where a machine's name is 127.0.0.1, gloo found nobody."""
    listener(engine_host(engine))  # skips where they aren't on this machine

    def node(number: int, container: Container) -> tuple[int, str]:
        line = "python3 -m launcher.agent.runner --cpu --processes-per-node 1 --nodes 2".split()
        line += f"--node-rank {number} --master-addr {FIRST} --master-port 29500 --".split()
        done = container.exec_run([*line, "/meet.py"], workdir="/repo")
        return done.exit_code, done.output.decode()

    with ExitStack() as stack:
        nodes = []
        for _ in range(2):
            container = engine.containers.run(
                image,
                ["sleep", "600"],
                detach=True,
                init=True,
                network_mode="none",
                environment={
                    "PYTHONPATH": "/opt/megatron/lib:/opt/packages/lib:/repo",
                    "LAUNCHER_ALL_REDUCE_SECONDS": "300",
                },
                volumes={str(ROOT): {"bind": "/repo", "mode": "ro"}},
            )
            stack.callback(container.remove, force=True)
            container.put_archive("/", tarred({"meet.py": MEET.encode()}))
            container.reload()
            nodes.append(container)
        stack.enter_context(machines_of([first_process(one) for one in nodes]))
        with ThreadPoolExecutor() as pool:
            ended = [*pool.map(node, (0, 1), nodes)]
    for code, printed in ended:
        assert code == 0, printed
        assert "ranks 2" in printed
        assert "runner: GLOO_SOCKET_IFNAME=cable, by which the nodes met: gloo" in printed
