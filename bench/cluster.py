"""What the launcher adds to a hand-written sbatch of the same job, and what 512 nodes take."""

from __future__ import annotations

import os
import random
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
from launcher.agent.ranks.job import free_port
from launcher.agent.ranks.rendezvous import Rendezvous
from launcher.base.settings import settings
from launcher.runs.backends.slurm import slurm_request
from launcher.runs.backends.slurm.slurm import SlurmBackend
from launcher.runs.follow.assemble import assemble, new_stamp
from launcher.runs.runfile import source
from launcher.runs.runfile.clusters import Slurm
from launcher.runs.runfile.source import RunRequest

NODES, TURNS = 512, 16
PROGRAM = "print('there', flush=True)\n"
BY_HAND = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
srun --output={folder}/by-hand-%n.out {python} {folder}/program.py
"""
RUN = """\
name: bench
image: cpu
gpus: 0
program: ./program.py
nodes: 2
slurm: {{container: none, setup: 'PATH={folder}/bin:$PATH'}}
"""
IN_PLACE = "#!/bin/sh\nexec {python} {folder}/program.py\n"
"""In place of the nodes' python3 and its runner, which needs torch, the program itself."""


def figures() -> list[Figure]:
    """Seconds; the cluster is Debian's Slurm on this machine, as the tests have it."""
    from tests.e2e.slurm import cluster

    with tempfile.TemporaryDirectory(prefix="launchpad-cluster-") as name:
        folder = Path(name)
        (folder / "slurm").mkdir()
        with cluster(settings().cache, folder / "slurm") as env:
            added = _added(folder, os.environ | env)
    return [Figure("Slurm: first line of a run, beyond sbatch by hand", added, 0.5, "s"), *_wide()]


def _added(folder: Path, env: dict[str, str]) -> float:
    """The difference of the means, one after the other in each turn, the first not counted.

    Slurm starts jobs at the ticks of its own clock, of a second: each is submitted at any time.
    """
    words = {"python": sys.executable, "folder": folder}
    for file, text in (("program.py", PROGRAM), ("run.yaml", RUN), ("by-hand.sh", BY_HAND)):
        (folder / file).write_text(text.format(**words) if file != "program.py" else text)
    (folder / "bin").mkdir()
    (folder / "bin/python3").write_text(IN_PLACE.format(**words))
    (folder / "bin/python3").chmod(0o755)
    env |= {"PYTHONPATH": str(ROOT), "LAUNCHER_RUNS": str(folder / "runs")}
    env |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    times: list[tuple[float, float]] = []
    for _ in range(TURNS + 1):
        times.append((_by_hand(folder, env), _launcher(folder, env)))
        _until_idle(env)
    by_hand, launcher = zip(*times[1:], strict=True)
    return statistics.mean(launcher) - statistics.mean(by_hand)


def _by_hand(folder: Path, env: dict[str, str]) -> float:
    outputs = [folder / f"by-hand-{node}.out" for node in (0, 1)]
    for path in outputs:
        path.unlink(missing_ok=True)
    start = time.monotonic()
    argv = ["sbatch", "--output", f"{folder}/slurm.out", str(folder / "by-hand.sh")]
    subprocess.run(argv, env=env, check=True, capture_output=True)
    while not any(path.exists() and path.stat().st_size for path in outputs):
        time.sleep(0.01)
    took = time.monotonic() - start
    _until_idle(env)
    return took


def _launcher(folder: Path, env: dict[str, str]) -> float:
    argv = [sys.executable, "-m", "launcher", "run", "run.yaml", "--backend", "slurm"]
    start = time.monotonic()
    with subprocess.Popen(
        argv, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        took = time.monotonic() - start
        _, errors = process.communicate()
    if b"there" not in line:
        raise RuntimeError(errors.decode())
    return took


def _until_idle(env: dict[str, str]) -> None:
    while subprocess.run(["squeue", "--noheader"], env=env, capture_output=True).stdout:
        time.sleep(0.05)
    time.sleep(random.uniform(0.1, 1.1))  # noqa: S311


def _wide() -> list[Figure]:
    """A job's rendering, its script beside that of two nodes, and the look before it starts.

    The look is a stand-in of 512 nodes in one process: each a thread, all on loopback.
    """
    config, origin = source.load("gpt3-175b", [])
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
