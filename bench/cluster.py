"""What the launcher adds to a hand-written sbatch of the same job, and what 512 nodes take."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from bench.measure import ROOT, Figure
from launcher.agent.ranks import ring
from launcher.agent.ranks.command_line import free_port
from launcher.agent.ranks.rendezvous import Rendezvous
from launcher.base.settings import settings
from launcher.runs.backends.slurm import slurm_request
from launcher.runs.backends.slurm.slurm import SlurmBackend
from launcher.runs.follow.assemble import assemble, new_stamp
from launcher.runs.runfile import origins
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.origins import RunRequest

NODES, TURNS = 512, 16
PROGRAM = "print('there', flush=True)\n"
BY_HAND = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks-per-node=1 --gpus-per-node=1
srun --output={folder}/by-hand.out {python} {folder}/program.py
"""
RUN = """\
name: bench
image: 24.10
gpus: 1
program: ./program.py
slurm: {{container: none, setup: 'PATH={folder}/bin:$PATH; export PYTHONPATH={folder}/lib'}}
"""
PYTHON3 = '#!/bin/sh\nexec {python} "$@"\n'
TORCH = """\
import time
from types import SimpleNamespace
time.sleep(2)
cuda = SimpleNamespace(device_count=lambda: 1, get_device_name=lambda n: "a GPU",
    get_device_capability=lambda n: (9, 0), get_arch_list=lambda: [])
"""
"""In place of torch, for the check of the GPUs: its import takes as long as torch's own."""

SBATCH = '#!/bin/sh\n{sbatch} "$@"; code=$?; date +%s.%N >{folder}/submitted; exit $code\n'


def figures() -> list[Figure]:
    """Seconds; the cluster is Debian's Slurm on this machine, as the tests have it."""
    from tests.e2e.slurm import cluster

    with tempfile.TemporaryDirectory(prefix="launchpad-cluster-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with cluster(settings().cache, folder / "slurm") as env:
            by_hand, launcher = _medians(folder, os.environ | env)
    told = f"Slurm: first line of a run, beyond sbatch's own ({by_hand[1]:.2f} s)"
    return [
        Figure(told, launcher[1] - by_hand[1], 0.5, "s"),
        Figure("  with what comes before sbatch", launcher[0] - by_hand[0], 1, "s"),
        *_wide(),
    ]


def _medians(folder: Path, env: dict[str, str]) -> list[list[float]]:
    """Seconds to the first line from the command's start and from sbatch's end, by hand and ours.

    One is after the other in each turn, the first not counted. Slurm starts jobs at the ticks of
    its own clock, of a second: each is submitted at any time.
    """
    sbatch = shutil.which("sbatch", path=env["PATH"])
    words = {"python": sys.executable, "folder": folder, "sbatch": sbatch}
    for name in ("bin", "lib"):
        (folder / name).mkdir()
    texts = {"run.yaml": RUN, "by-hand.sh": BY_HAND, "bin/python3": PYTHON3, "bin/sbatch": SBATCH}
    for file, text in texts.items():
        (folder / file).write_text(text.format(**words))
    for file, text in {"program.py": PROGRAM, "lib/torch.py": TORCH}.items():
        (folder / file).write_text(text)
    for file in ("python3", "sbatch"):
        (folder / "bin" / file).chmod(0o755)
    env |= {"PATH": f"{folder}/bin:{env['PATH']}"}
    env |= {"PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(folder / "runs")}
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    times = [[one(folder, env) for one in (_by_hand, _launcher)] for _ in range(TURNS + 1)][1:]
    return [
        [statistics.median(seconds) for seconds in zip(*each, strict=True)]
        for each in zip(*times, strict=True)
    ]


def _by_hand(folder: Path, env: dict[str, str]) -> tuple[float, float]:
    output = folder / "by-hand.out"
    output.unlink(missing_ok=True)
    start = time.time()
    argv = ["sbatch", "--output", f"{folder}/slurm.out", str(folder / "by-hand.sh")]
    subprocess.run(argv, env=env, check=True, capture_output=True)
    while not (output.exists() and output.stat().st_size):
        time.sleep(0.01)
    took = _since(start, folder)
    _until_idle(env)
    return took


def _launcher(folder: Path, env: dict[str, str]) -> tuple[float, float]:
    argv = [sys.executable, "-m", "launcher", "run", "run.yaml", "--backend", "slurm"]
    start = time.time()
    with subprocess.Popen(
        argv, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        took = _since(start, folder)
        _, errors = process.communicate()
    if b"there" not in line:
        raise RuntimeError(errors.decode())
    _until_idle(env)
    return took


def _since(start: float, folder: Path) -> tuple[float, float]:
    now = time.time()
    return now - start, now - float((folder / "submitted").read_text())


def _until_idle(env: dict[str, str]) -> None:
    while subprocess.run(["squeue", "--noheader"], env=env, capture_output=True).stdout:
        time.sleep(0.05)
    time.sleep(random.uniform(0.1, 1.1))  # noqa: S311


def _wide() -> list[Figure]:
    """A job's rendering, its script beside that of two nodes, and the look before it starts.

    The look is a stand-in of 512 nodes in one process: each a thread, all on loopback.
    """
    config, origin = origins.load("gpt3-175b", [])
    asked = RunRequest(config, origin, os.getcwd())
    plan = assemble(asked, SlurmBackend(), new_stamp(), dry=True).plan
    start = time.monotonic()
    wide = slurm_request.request(replace(plan, nodes=NODES), Slurm(), Path("/runs/a")).script
    rendered = time.monotonic() - start
    more = len(wide) - len(
        slurm_request.request(replace(plan, nodes=2), Slurm(), Path("/runs/a")).script
    )
    return [
        Figure(f"Slurm: the script of {NODES} nodes, rendered", rendered, 1, "s"),
        Figure(f"Slurm: its length, beyond that of 2 nodes ({len(wide)} bytes)", more, 2, "B"),
        Figure(f"{NODES} nodes meet, and send to each other in a ring", _look(), 60, "s"),
    ]


def _look() -> float:
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    port = free_port()

    def one(node: int) -> list[str]:
        with closing(Rendezvous(node, NODES, "127.0.0.1", port, print)) as here:
            here.join(60)
            return ring.broken(ring.look(here))

    start = time.monotonic()
    with ThreadPoolExecutor(NODES) as pool:
        found = [*pool.map(one, range(NODES))]
    assert not any(found), found[0]
    return time.monotonic() - start
