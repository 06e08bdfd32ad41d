"""A run killed again and again goes on to where it would have come uninterrupted."""

from __future__ import annotations

import os
import random
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from launcher.train.checkpoints import folders

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

    from tests.conftest import CpuImages

pytestmark = pytest.mark.engine

KILLS = 10
STEPS = 60
LAST_KILL = 40  # what comes after leaves it the time that a kill takes to arrive
SAVE_INTERVAL = 5
GPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --vocab-size 100 "
    "--make-vocab-size-divisible-by 64 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 "
    "--log-interval 1 --eval-iters 1 --eval-interval 1000 --mock-data "
    f"--save-interval {SAVE_INTERVAL}"
).split()
TENSOR = ("--tensor-model-parallel-size", "2")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")

KILL = """
import os, sys
from pathlib import Path
for path in Path("/proc").glob("[0-9]*/environ"):
    process = int(path.parent.name)
    if f"\\0RANK={sys.argv[1]}\\0" in path.read_text() and os.getsid(process) == process:
        os.kill(process, 9)
"""


@dataclass(frozen=True)
class Kill:
    """SIGKILL for a rank, or for the container where `rank` is None, `delay` s after a step."""

    step: int
    rank: int | None
    delay: float


@dataclass(frozen=True)
class Leg:
    """What a run printed until it ended, and its exit code."""

    code: int
    output: str

    @property
    def losses(self) -> dict[int, str]:
        """The training loss by iteration, to every digit that is printed."""
        return dict(
            (int(step), loss)
            for step, loss in re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", self.output)
        )

    @property
    def held_out(self) -> str:
        return re.findall(r"lm loss value: (\S+)", self.output)[-1]


@dataclass(frozen=True)
class Runs:
    """Starts runs in containers of one image, that save to and load from a folder here."""

    engine: DockerClient
    image: str

    def leg(self, folder: Path, ranks: int, *more: str, kill: Kill | None = None) -> Leg:
        """Run until the end, or until it is killed."""
        folder.mkdir(exist_ok=True)
        runner = ["python3", "-m", "launcher.train.runner", "--cpu", "--processes-per-node"]
        program = ["-m", "launcher.train.gpt", *GPT, "--train-iters", str(STEPS), *more]
        container = self.engine.containers.create(
            self.image,
            [*runner, str(ranks), "--", *program, "--save", "/c", "--load", "/c"],
            init=True,
            network_mode="none",
            user=f"{os.getuid()}:{os.getgid()}",
            environment={"HOME": "/tmp", "OMP_NUM_THREADS": "1"},  # noqa: S108
            volumes={str(folder): {"bind": "/c", "mode": "rw"}},
        )
        try:
            container.start()
            output = "".join(self._follow(container, kill))
            return Leg(container.wait()["StatusCode"], output)
        finally:
            container.remove(force=True)

    def _follow(self, container: Container, kill: Kill | None) -> Iterator[str]:
        rest = ""
        for chunk in container.logs(stream=True, follow=True):
            rest += chunk.decode()
            *lines, rest = rest.split("\n")
            for line in lines:
                yield f"{line}\n"
                if kill and re.search(rf"iteration +{kill.step}/", line):
                    self._kill(container, kill)

    def _kill(self, container: Container, kill: Kill) -> None:
        time.sleep(kill.delay)
        if kill.rank is None:
            container.kill("SIGKILL")
        else:
            container.exec_run(["python3", "-c", KILL, str(kill.rank)])


@pytest.fixture(scope="module")
def runs(engine: DockerClient, cpu_images: CpuImages) -> Runs:
    return Runs(engine, cpu_images.build())


def chosen(count: int) -> list[Kill]:
    """Kills at random steps in order; printed, and repeated by RESUME_SEED."""
    seed = int(os.environ.get("RESUME_SEED", random.randrange(2**32)))  # noqa: S311
    rng = random.Random(seed)  # noqa: S311
    steps = sorted(rng.choices(range(1, LAST_KILL + 1), k=count))
    kills = [Kill(step, rng.choice([0, 1, None]), rng.uniform(0, 0.1)) for step in steps]
    print(f"RESUME_SEED={seed}", *kills, sep="\n")
    return kills


def newest(folder: Path) -> int:
    """The iteration of the newest complete checkpoint; 0 where there is none."""
    found = folders.newest_complete(folder)
    return found.iteration if found else 0


def contents(folder: Path) -> dict[str, bytes]:
    """Weights, optimizer, random states and progress; the index has an id of its own."""
    names = sorted(path for path in folder.iterdir() if path.suffix in (".distcp", ".pt"))
    return {path.name: path.read_bytes() for path in names}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_killed_ten_times_it_ends_as_if_it_had_not_been(runs: Runs, tmp_path: Path) -> None:
    """The same layout with dropout: every loss of every leg, and the weights' bytes at the end."""
    whole = runs.leg(tmp_path / "whole", 2, *TENSOR)
    assert whole.code == 0, whole.output
    folder = tmp_path / "killed"
    for kill in chosen(KILLS):
        before = newest(folder)
        # A step is printed again only where it comes after what was saved.
        at = Kill(max(kill.step, before + 1), kill.rank, kill.delay)
        leg = runs.leg(folder, 2, *TENSOR, kill=at)
        assert leg.code == 137, leg.output
        assert min(leg.losses) == before + 1, leg.output
        assert leg.losses == {step: whole.losses[step] for step in leg.losses}
    last = runs.leg(folder, 2, *TENSOR)
    assert last.code == 0, last.output
    assert last.losses == {step: whole.losses[step] for step in last.losses}
    assert max(last.losses) == STEPS
    assert last.held_out == whole.held_out
    assert newest(folder) == STEPS
    final = folders.folder("", STEPS)
    saved = contents(folder / final)
    assert len(saved) >= 3
    assert saved == contents(tmp_path / "whole" / final)


@pytest.mark.timeout(600)
def test_killed_and_resumed_in_another_layout(runs: Runs, tmp_path: Path) -> None:
    whole = runs.leg(tmp_path / "whole", 2, *TENSOR, *NO_DROPOUT)
    assert whole.code == 0, whole.output
    first, second = chosen(2)
    for name, ranks, layout, kill in (("tensor", 2, TENSOR, first), ("single", 1, (), second)):
        rank = 0 if kill.rank and ranks == 1 else kill.rank
        at = Kill(max(kill.step, SAVE_INTERVAL + 1), rank, kill.delay)
        leg = runs.leg(tmp_path / name, ranks, *layout, *NO_DROPOUT, kill=at)
        assert leg.code == 137, leg.output
        assert 0 < newest(tmp_path / name) < STEPS
    shutil.copytree(tmp_path / "tensor", tmp_path / "copy")
    for name, ranks, layout in (("tensor", 1, ()), ("copy", 2, ()), ("single", 2, TENSOR)):
        leg = runs.leg(tmp_path / name, ranks, *layout, *NO_DROPOUT)
        assert leg.code == 0, leg.output
        assert float(leg.held_out) == pytest.approx(float(whole.held_out), abs=1e-3)
        losses = {step: float(loss) for step, loss in leg.losses.items()}
        assert losses == pytest.approx({n: float(whole.losses[n]) for n in losses}, abs=1e-3)
