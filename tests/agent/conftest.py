"""How the tests of launcher.agent start ranks, and what they skip without torch or Megatron."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.ranks import stacks
from launcher.agent.ranks.command_line import free_port, parse
from tests.conftest import missing

ROOT = Path(__file__).parents[2]

SetGpus = Callable[..., None]

TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 6 --lr 1e-2 --log-interval 1 "
    "--eval-iters 1 --hidden-dropout 0 --attention-dropout 0"
).split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    absent = missing("torch", "megatron.core")
    skip = pytest.mark.skip(reason=f"{' and '.join(absent)} can't be imported here")
    for item in items if absent else ():
        if item.get_closest_marker("megatron") and re.search(
            "tests/(agent|trainer)/", item.path.as_posix()
        ):
            item.add_marker(skip)


@dataclass
class Run:
    """Ranks: their runner, or how they ended, and what they have printed so far."""

    process: Any
    output: str = ""

    def line(self) -> str:
        """The next line. Fails where they end before."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"ended before: {self.output}"
        self.output += line
        return line

    @property
    def code(self) -> int:
        """The exit code, once they have ended."""
        return int(self.process.returncode)

    @property
    def losses(self) -> dict[int, float]:
        """The training loss by iteration."""
        lines = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", self.output)
        return {int(iteration): float(loss) for iteration, loss in lines}

    @property
    def grad_norms(self) -> list[float]:
        return [float(norm) for norm in re.findall(r"grad norm: (\S+)", self.output)]

    @property
    def validation_loss(self) -> float:
        return float(re.findall(r"lm loss value: (\S+)", self.output)[-1])


def runner_command(
    processes: int, *program: str, options: Sequence[str] = (), cpu: bool = True
) -> list[str]:
    """The command that starts a program's ranks, by default on the CPU."""
    runner = [sys.executable, "-m", "launcher.agent.runner", *(["--cpu"] if cpu else []), *options]
    return [*runner, "--processes-per-node", str(processes), "--", *program]


TORCH = """\
from types import SimpleNamespace
cuda = SimpleNamespace(device_count=lambda: {gpus}, get_device_name=lambda number=0: "a GPU",
    get_device_capability=lambda number: (9, 0), get_arch_list=lambda: [],
    is_available=lambda: True)
distributed = SimpleNamespace(init_process_group=lambda *given, **more: None,
    all_reduce=lambda sums, **more: None, get_world_size=lambda group: 12,
    ReduceOp=SimpleNamespace(MAX=None))
class full:
    __init__ = lambda self, *given, **more: None
    __eq__ = __getitem__ = lambda self, other: self
    all = lambda self: True
    item = lambda self: 1.0
zeros = full
"""
"""In place of torch on a node with GPUs whose sums are right and take a second each: what the
runner asks of it."""


@pytest.fixture
def gpus(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> SetGpus:
    """Lets the runner find so many GPUs, once torch has run the code `before`.

    Ranks whose program needs no torch start at once there.
    """
    folder = tmp_path_factory.mktemp("gpus")
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def there(number: int, before: str = "") -> None:
        (folder / "torch.py").write_text(before + TORCH.format(gpus=number))

    return there


def environment() -> dict[str, str]:
    """This environment, with the checkout importable in any folder, and no warnings."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}


def python(*argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python to its end, in `environment` with some variables more."""
    command, given = [sys.executable, *argv], environment() | env
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=900)


@contextmanager
def going_on(command: list[str]) -> Iterator[Run]:
    """Start what `runner_command` gives; afterwards wait for its end, and read all of it."""
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        ranks = Run(process)
        try:
            yield ranks
            assert process.stdout
            ranks.output += process.stdout.read()
        except BaseException:
            process.kill()  # its ranks end with it
            raise


@contextmanager
def nodes(
    program: Sequence[str], *processes: int, options: Sequence[str] = (), cpu: bool = False
) -> Iterator[list[Run]]:
    """The nodes of a run of that program, each with so many processes, as `going_on` has them."""
    where = ["--nodes", str(len(processes)), "--master-addr", "127.0.0.1"]
    where += ["--master-port", str(free_port()), *options, "--node-rank"]
    with ExitStack() as stack:
        lines = [
            runner_command(each, *program, options=[*where, str(node)], cpu=cpu)
            for node, each in enumerate(processes)
        ]
        yield [stack.enter_context(going_on(line)) for line in lines]


OUTSIDE = environment()
"""This environment without what tests set, which the first one would leave to all others' ranks."""


@cache
def forking() -> subprocess.Popen[str]:
    """What forks ranks. It ends with this process, by the end of what it reads."""
    script, pipe = str(Path(__file__).with_name("forked.py")), subprocess.PIPE
    command = [sys.executable, "-u", script]
    return subprocess.Popen(command, env=OUTSIDE, stdin=pipe, stdout=pipe, text=True)


def start(processes: int, *program: str) -> Run:
    """Run a program's ranks on the CPU to their end, without the runner."""
    options = ["--cpu", "--processes-per-node", str(processes), "--"]
    job, given = parse([*options, *program], {}), environment()
    ranks = [given | job.environment(rank, given, processes) for rank in range(processes)]
    process = forking()
    assert process.stdin
    assert process.stdout
    with tempfile.NamedTemporaryFile("r") as output:
        asked = {"program": program, "ranks": ranks, "folder": os.getcwd(), "output": output.name}
        try:
            print(json.dumps(asked), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
        except BaseException:
            process.kill()  # its ranks end with it
            forking.cache_clear()
            raise
        return Run(subprocess.CompletedProcess(program, code), output.read())


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Those that a test starts, which end with it."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start_rank(folder: Path, number: int, program: str) -> subprocess.Popen[bytes]:
    """A process that runs `program` as a rank does, once it has come to its last line."""
    script, there = folder / f"program-{number}.py", folder / f"there-{number}"
    before = "import ctypes, os, signal, socket, sys, threading, time"
    script.write_text(
        f"{before}\ndef hang():\n    open({str(there)!r}, 'w')\n    {program}\nhang()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.agent.ranks.stacks", str(script), "--an", "option"],
        env={**environment(), stacks.FOLDER: str(folder), "RANK": str(number)},
    )
    until = time.monotonic() + 60
    while not there.exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    return process


@pytest.fixture
def small_disk() -> Path:
    """An empty file system of 1 MB, as the container has it that these tests run in."""
    if "SMALL_DISK" not in os.environ:
        pytest.skip("SMALL_DISK names no small file system")
    disk = Path(os.environ["SMALL_DISK"])
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return disk


@pytest.fixture(scope="session")
def train() -> Callable[..., Run]:
    """Train a tiny GPT on mock data; extra arguments win. Fails unless the exit code is 0."""

    def trained(processes: int, *extra: str, data: tuple[str, ...] = ("--mock-data",)) -> Run:
        run = start(processes, "-m", "launcher.trainer.gpt", *TINY, *data, *extra)
        assert run.code == 0, run.output
        return run

    return trained
