"""Runs as jobs of a real Slurm with two nodes on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from launcher.base.settings import ROOT, Settings
from tests.conftest import CpuImages, missing
from tests.e2e.site import RUNNER, Site, Started, leaves_to_others, program, until
from tests.e2e.slurm import cluster
from tests.e2e.test_compose import COUNTING, FAILING
from tests.e2e.test_compose import MEETING as MEETING_ONE_BY_ONE

pytestmark = [pytest.mark.engine, pytest.mark.skipif(os.geteuid() != 0, reason="needs root")]

MEETING = MEETING_ONE_BY_ONE.replace(
    "    peers = [socket.create_connection(meeting)]",
    """\
    while True:
        try:
            peers = [socket.create_connection(meeting)]
            break
        except OSError:
            time.sleep(0.1)""",
)
"""Here nobody waits for the first node before the others are started."""

LOSS = re.compile(r"iteration +(\d+)/.* lm loss: (\S+)")
TINY = {
    "model": {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 16,
        "max_position_embeddings": 16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "training": {"micro_batch_size": 2, "global_batch_size": 4, "lr": 1e-3, "seed": 1},
    "data": {"mock": True, "vocab_size": 100},
    "logging": {"log_interval": 1, "eval_interval": 1000000, "eval_iters": 1},
}


@pytest.fixture(scope="module")
def slurm(site: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster, by its variables."""
    with cluster(site.cache, tmp_path_factory.mktemp("slurm")) as env:
        yield env


@pytest.fixture
def three(site: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A cluster of three nodes."""
    with cluster(site.cache, tmp_path_factory.mktemp("three"), 3) as env:
        yield env


class OnCluster(Site):
    """A folder from which runs are submitted."""

    cluster: dict[str, str]

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | self.cluster

    def found(self) -> str:
        """The run that was submitted."""
        (path,) = (self.folder / "runs").glob("*/slurm.json")
        return path.parent.name

    def queue(self) -> list[str]:
        """The states of the jobs that haven't ended."""
        return self.asked("squeue", "--noheader", "--format=%T").split()

    def asked(self, *argv: str) -> str:
        """What a program of Slurm prints."""
        options: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
        return str(subprocess.run(argv, env=self.environment, **options).stdout)

    def stand_in(self, runner: str = RUNNER) -> str:
        """What gives the nodes a python3 that is this one, but for the runner."""
        (self.folder / "bin").mkdir(exist_ok=True)
        (self.folder / "runner.py").write_text(runner)
        payload = f"$(echo {self.folder}/runs/.payloads/*)"  # in an image that is none
        lines = [f'set -- "${{1/#\\/opt\\/launchpad/{payload}}}" "${{@:2}}"']
        python = shlex.quote(sys.executable)
        lines += [f'[ "$2" != runner ] || exec {python} {self.folder}/runner.py "$@"']
        script = "\n".join(["#!/bin/bash", *lines, f'exec {python} "$@"', ""])
        program(self.folder / "bin/python3", script)
        return f'export PATH={shlex.quote(str(self.folder / "bin"))}:"$PATH"'

    def counts(
        self,
        program: str = MEETING + COUNTING,
        mounts: Sequence[Any] = (),
        gpus: int = 0,
        nodes: Any = 2,
        save: str | None = None,
        **more: Any,
    ) -> None:
        """Two nodes of a program that needs no torch, with a stand-in for the runner."""
        keys = {"setup": self.stand_in()} | more
        config = {"image": "cpu", "gpus": gpus, "program": "./program.py", "nodes": nodes}
        config |= {"checkpoint": {"save": save}} if save else {}
        self.write({**config, "mounts": [*mounts], "slurm": {"container": "none", **keys}}, program)

    def starts(self, *arguments: Any, **more: Any) -> Started:
        """The launcher of such a run."""
        self.counts(*arguments, **more)
        return self.start("run", "run.yaml", "--backend", "slurm")


@pytest.fixture
def here(here: Site, slurm: dict[str, str]) -> Iterator[OnCluster]:
    """A folder to submit from; afterwards nothing may be queued."""
    found = OnCluster(here.folder, here.client, here.name, here.started)
    found.cluster = slurm
    yield found
    try:  # a test that has failed may have left a launcher and its job
        if all(one.process.poll() is not None for one in found.started):
            until(lambda: not found.queue(), "jobs are left")
    finally:  # or the next test's would wait for their nodes
        found.asked("scancel", "--me")
    assert not list((found.folder / "runs").glob("*/slurm.json"))


def test_nodes_meet_and_stop_when_asked(here: OnCluster) -> None:
    started = here.starts()
    for rank in (0, 1):
        started.said(f"node-{rank} | line")
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 7
    assert re.fullmatch(r"run \w+ stopped, exit code 7: on node-[01]", started.told()[-1])
    assert re.fullmatch(r"(node-[01] \| (met as [01]|line)\n)*", started.out)


@pytest.mark.parametrize("there", [False, True])
def test_a_node_without_what_the_options_import_starts_no_rank(
    here: OnCluster, there: bool
) -> None:
    """Nobody knows before the job begins what its Python has; torch is a stand-in without cure."""
    for name in ("torch", "megatron/core", *(["wandb"] if there else [])):
        (here.folder / "modules" / name).mkdir(parents=True)
        (here.folder / "modules" / name / "__init__.py").touch()
    config = {"image": "cpu", "gpus": 0, "program": "gpt", **TINY}
    config |= {"logging": {**TINY["logging"], "wandb_project": "p", "wandb_exp_name": "e"}}
    config |= {"env": {"PYTHONPATH": str(here.folder / "modules")}}
    config |= {"training": {**TINY["training"], "train_iters": 2}}
    setup = f'export PATH={shlex.quote(os.path.dirname(sys.executable))}:"$PATH"'
    here.write({**config, "slurm": {"container": "none", "setup": setup}}, "")
    started = here.start("run", "run.yaml", "--backend", "slurm")
    code, said = started.ends(), f"{started!r}"
    refusal = (
        "logging.wandb_project: p needs the Python package wandb. python3 -m pip install wandb"
    )
    assert (code == 121, refusal in said) == (not there, not there), said
    assert ("rank 0 exited with code" in said) == there


def test_a_killed_launcher_leaves_the_job_to_others(here: OnCluster) -> None:
    """By Slurm's queue and the files on the shared disk alone."""
    here.counts()
    leaves_to_others(here, "--backend", "slurm", run=here.found, first="node-1 | line")


def test_the_first_node_to_fail_is_named_and_ends_the_others(here: OnCluster) -> None:
    started = here.starts(MEETING + FAILING)
    assert started.ends() == 3
    ended = "failed: node-1: rank 1 exited with code 3"
    assert any(line.endswith(ended) for line in started.told())


XID = """
import os, sys
host = os.environ["SLURMD_NODENAME"]
print("runs on", host, flush=True)
if host == "n0":
    print("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", file=sys.stderr)
    sys.exit(1)
"""


def test_a_bad_node_is_named_remembered_and_left_out(
    three: dict[str, str], here: OnCluster
) -> None:
    """Of three: Slurm gives the first one each time, and the third start fails as well."""
    here.cluster = three
    here.counts(XID, exclude="auto")
    for _ in range(2):
        started = here.done("run", "run.yaml", "--backend", "slurm")
        assert started.process.returncode == 1, started
        assert "the node n0 caused it: a GPU is broken" in started.err
    listed = here.done("nodes").out.splitlines()
    assert [line.split()[:3] for line in listed[1:]] == [["n0", "2", "2"]]
    again = here.done("run", "run.yaml", "--backend", "slurm")
    assert again.process.returncode == 0, again
    assert "n0 is left out: 2 failures in 7 days (a GPU is broken)" in again.err
    assert sorted(again.out.splitlines()) == ["node-0 | runs on n1", "node-1 | runs on n2"]


@pytest.mark.long
@pytest.mark.skipif(bool(missing("torch", "megatron.core")), reason="no torch or megatron.core")
def test_of_nodes_with_a_spare_one_as_many_train_as_are_asked_for(
    three: dict[str, str], here: OnCluster
) -> None:
    """The spare one's end would have ended the job, or its ranks been waited for."""
    here.cluster = three
    setup = f'export PATH={shlex.quote(os.path.dirname(sys.executable))}:"$PATH"'
    config = {"image": "cpu", "gpus": 0, **TINY, "nodes": {"count": 2, "spare": 1}}
    config["training"] = {**TINY["training"], "train_iters": 3}
    config["env"] = {"TORCHINDUCTOR_CACHE_DIR": str(here.folder / "compiled")}
    here.write({**config, "slurm": {"container": "none", "setup": setup}}, "")
    started = here.done("run", "run.yaml", "--backend", "slurm")
    assert started.process.returncode == 0, started
    assert "the run goes on with 2 nodes, and this one is spare" in started.err
    assert started.out.count("finished after iteration 3\n") == 1


def test_a_failed_run_is_submitted_again(here: OnCluster) -> None:
    tried = str(here.folder / "tried")
    here.counts(
        MEETING + f"tried = {tried!r}\n"
        "if rank == 1 and not os.path.exists(tried):\n"
        "    open(tried, 'w').close()\n"
        "    sys.exit(3)\n"
    )
    started = here.done("run", "run.yaml", "--backend", "slurm", "--max-restarts", "1")
    assert started.process.returncode == 0, started
    assert "starting it again: 1 of 1 times" in started.err
    assert started.out.count("met as 1") == 2


def test_one_that_waits_is_told_why_and_taken_out_of_the_queue(here: OnCluster) -> None:
    started = here.starts(dependency="afterok:1", options={"hold": True})
    started.said("waits: JobHeldUser")
    assert here.queue() == ["PENDING"]
    started.process.send_signal(signal.SIGTERM)
    assert started.ends() == 143


def test_what_a_node_does_not_see_is_told_with_the_node(here: OnCluster) -> None:
    """The node has gone without the folder since the launcher looked."""
    (here.folder / "data").mkdir()
    started = here.starts(options={"hold": True}, mounts=[{"source": "data", "target": "/data"}])
    started.said("waits: JobHeldUser")
    (here.folder / "data").rmdir()
    jobs = here.asked("squeue", "--noheader", "--format=%i").split()
    here.asked("scontrol", "release", *jobs)
    assert started.ends() == 121
    assert re.search(r"node-1 \| launcher: there is no \S+/data on n1: ", started.err)


def test_the_ranks_of_a_node_get_its_cpus(here: OnCluster) -> None:
    """All ranks of a node had one CPU between them, where jobs share nodes by cores."""
    program = "import os\nprint('CPUs', len(os.sched_getaffinity(0)), flush=True)\n"
    here.counts(program, gpus=2)
    started = here.done("run", "run.yaml", "--backend", "slurm")
    assert started.out.count(f"CPUs {os.cpu_count()}\n") == 2
    for gpus, cpus in ((0, 1), (1, os.cpu_count())):  # by sbatch, which srun has to be told
        here.counts(program, gpus=gpus, options={"cpus-per-task": cpus})
        started = here.done("run", "run.yaml", "--backend", "slurm")
        assert started.out.count(f"CPUs {cpus}\n") == 2, started


def test_gpus_that_slurm_gives_out_are_seen_by_the_program(here: OnCluster) -> None:
    """Of two one; and what no node has is refused as the job is submitted."""
    program = "import os\nprint('sees', os.environ['CUDA_VISIBLE_DEVICES'], flush=True)\n"
    here.counts(program, gpus=1)
    started = here.done("run", "run.yaml", "--backend", "slurm")
    assert started.process.returncode == 0, started
    assert sorted(started.out.splitlines()) == [f"node-{n} | sees 0" for n in (0, 1)]
    refused = here.done("run", "run.yaml", "--backend", "slurm", "--gpus", "3")
    assert refused.process.returncode == 125
    assert "node configuration is not available" in refused.err


def test_tasks_of_an_array_are_runs_of_their_own(here: OnCluster) -> None:
    """Found, asked and stopped one by one; each with a folder and a number of its own."""
    program = "print(os.environ['SLURM_ARRAY_TASK_ID'], sys.argv[1:], flush=True)\n"
    here.counts(MEETING + program + COUNTING, save="save", array="1,3")
    first, third = here.done("run", "run.yaml", "--backend", "slurm").out.split()
    assert {first, third} <= {*here.done("ps", "--quiet").out.split()}
    for number, run in ((1, first), (3, third)):  # the second has to wait: the nodes are taken
        following = here.start("attach", run)
        following.said(f"{number} ['--save', '{here.folder}/save/{number}']")
        following.said("node-1 | line")
        assert here.done("exec", run, "--", "echo", "here").out == "here\n"
        assert here.done("stop", run).process.returncode == 0
        assert following.ends() == 7


STARTS = "import os, time\nprint('start', os.environ['restart'], flush=True)\ntime.sleep(60)\n"


def at_its_limit(here: OnCluster) -> None:
    """Ask the job's script alone to stop, as Slurm does ahead of slurm.time."""
    (job,) = here.asked("squeue", "--noheader", "--states=running", "--format=%A").split()
    end = ["scancel", "--signal=TERM", "--batch", job]  # it says "done already"
    subprocess.run(end, env=here.environment, check=False, timeout=60)


def test_jobs_of_a_chain_are_one_run(here: OnCluster) -> None:
    """Each goes on when the one before is at its time limit; a failure leaves none in the queue."""
    program = (
        "import os, signal, sys, time\n"
        "print(os.environ['restart'], '--load' in sys.argv, flush=True)\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(3 * int(os.environ['restart'])))\n"
        "while True:\n    time.sleep(0.05)\n"
    )
    started = here.starts(program, nodes=1, save="save", array="0-2%1")
    for said in ("0 False\n", "1 True\n"):
        started.said(said)
        at_its_limit(here)
    assert started.ends() == 3, started
    assert started.out == "0 False\n1 True\n"


def test_a_time_limit_before_the_program_handles_its_signal_ends_no_chain(here: OnCluster) -> None:
    """The program died of the signal while it imported torch: the run was over.

    With a step in the array no job was the one after another, so that each of them started again.
    """
    started = here.starts(STARTS, nodes=1, save="save", array="0-6:2%1")
    for start in (0, 2):
        started.said(f"start {start}\n")
        at_its_limit(here)
    assert started.ends() == 143, started  # and not a third time
    assert started.out == "start 0\nstart 2\n"


SAYS = """\
import os, time
told = [os.environ[name] for name in ("PET_NODE_RANK", "PET_NNODES", "restart")]
print("node {} of {}, start {}".format(*told), flush=True)
while not os.path.exists("FOLDER/done"):
    time.sleep(0.05)
"""


@pytest.mark.long
def test_a_node_that_is_gone_is_done_without(here: OnCluster) -> None:
    """The job waits in the queue again, which holds it for two minutes, and takes what is left."""
    nodes = {"count": 2, "min": 1}
    started = here.starts(SAYS.replace("FOLDER", str(here.folder)), nodes=nodes, requeue=True)
    for node in (0, 1):
        started.said(f"node-{node} | node {node} of 2, start 0")
    here.asked("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    try:
        started.said("node-0 | node 0 of 1, start 1")
    finally:
        here.asked("scontrol", "update", "nodename=n1", "state=resume")
    (here.folder / "done").touch()
    assert started.ends() == 0, started


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True, timeout=10)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        pytest.param("full", "No space left on device", marks=pytest.mark.long),
        pytest.param("gone", "No such file or directory; calling scancel", marks=pytest.mark.long),
        ("read-only", "Read-only file system; calling scancel"),
    ],
)
def test_the_shared_folder_fails_in_the_middle(here: OnCluster, fault: str, said: str) -> None:
    """Nothing goes on, and why is told. A server's folder may be written no more in the middle."""
    runs, server = here.folder / "runs", here.folder / "server"
    server.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m,mode=0755", "launchpad", str(server))
    mount("--bind", str(server), str(runs))
    program = MEETING + COUNTING
    if fault == "full":
        program = MEETING + "print('x' * 2**21, flush=True)\nsys.exit(3)\n"
    try:
        started = here.starts(program)
        run = until(lambda: [*runs.glob("*/job.sh")])[0].parent.name
        if fault != "full":
            started.said("node-1 | line")
            subprocess.run(["umount", "--lazy", str(runs)], check=True, timeout=10)
            if fault == "read-only":
                mount("--bind", "-o", "ro", str(server), str(runs))
            started.process.send_signal(signal.SIGINT)
        assert started.ends() != 0, started
        assert said in started.err
        assert "Traceback" not in started.err
        assert f"launcher: run {run} " in started.err  # how it ended
    finally:
        for path in (runs, server):
            subprocess.run(["umount", "--lazy", str(path)], check=False, timeout=10)
    until(lambda: not here.queue(), "it goes on")


@pytest.mark.long
def test_a_run_whose_folder_becomes_read_only_ends_as_it_would(here: OnCluster) -> None:
    """By what Slurm says: the script can't write its code, and that isn't the run's failure."""
    runs, server = here.folder / "runs", here.folder / "server"
    server.mkdir()
    mount("--bind", str(server), str(runs))
    try:
        started = here.starts(SAYS.replace("FOLDER", str(here.folder)))
        started.said("node-1 | node 1 of 2")
        subprocess.run(["umount", "--lazy", str(runs)], check=True, timeout=10)
        mount("--bind", "-o", "ro", str(server), str(runs))
        (here.folder / "done").touch()
        assert started.ends() == 0, started
        assert "Read-only file system" in started.err
    finally:
        subprocess.run(["umount", "--lazy", str(runs)], check=False, timeout=10)
        for path in server.glob("*/slurm.json"):
            path.unlink()


def test_what_slurm_refuses_leaves_nothing(here: OnCluster) -> None:
    here.counts(partition="none")
    started = here.done("run", "run.yaml", "--backend", "slurm")
    assert started.process.returncode == 125
    assert "invalid partition" in started.err
    assert not list((here.folder / "runs").glob("*/job.sh"))


def test_what_the_script_says_is_told(here: OnCluster) -> None:
    """This Slurm has no pyxis, so srun doesn't know its options."""
    started = here.starts(container="pyxis")
    assert started.ends() == 255
    assert "job | srun: unrecognized option" in started.err


def test_text_becomes_tokens_in_parts_at_once(here: OnCluster) -> None:
    """The same bytes as by one job; a part that fails is told, and ends the others."""
    lines = [json.dumps({"text": f"document {number} " * (number % 9)}) for number in range(500)]
    (here.folder / "text.jsonl").write_text("\n".join(lines))
    line = ["data", "tokenize", "text.jsonl", "--append-eod", "--output-prefix"]
    whole = here.done(*line, "whole")
    parts = here.done(*line, "parts", "--slurm", "3", "--sbatch=--time=5")
    assert (whole.process.returncode, parts.process.returncode) == (0, 0), parts
    assert re.findall(r"part . of 3 is done, (.) to come", parts.err) == ["2", "1", "0"]
    assert parts.out.startswith("500 documents, ")
    for suffix in (".bin", ".idx"):
        one, other = (here.folder / f"{name}_text_document{suffix}" for name in ("whole", "parts"))
        assert one.read_bytes() == other.read_bytes()
    kept = ["parts_text_document.bin", "parts_text_document.idx", "parts_text_document.made.json"]
    assert sorted(path.name for path in here.folder.glob("parts*")) == kept
    with (here.folder / "text.jsonl").open("a") as file:
        file.write("\nno JSON")
    failed = here.done(*line, "new", "--slurm", "2")
    assert failed.process.returncode == 1
    assert re.search(
        r"launcher: part 2 of 2 failed with exit code 1:\n(.*\n)*.*501: not JSON", failed.err
    )
    assert not list(here.folder.glob("new_*"))
    assert not list(here.folder.glob(".*"))


@pytest.mark.parametrize(
    ("container", "program"),
    [
        ("apptainer", "sys.exit(1)\n"),
        pytest.param("none", MEETING, marks=pytest.mark.long),
    ],
)
def test_a_container_that_does_not_start_is_the_failure(
    here: OnCluster, container: str, program: str
) -> None:
    """Not the node that waits for it, which had been blamed; it is ended where it goes on.

    To srun a task without a container of pyxis' is one that a prolog had end before it began.
    """
    setup = [here.stand_in()]
    if container == "none":  # a stand-in for pyxis
        prolog = here.folder / "prolog"
        prolog.write_text('#!/bin/sh\n[ "$SLURM_NODEID" = 0 ]\n')
        prolog.chmod(0o755)
        here.cluster = here.cluster | {"SLURM_TASK_PROLOG": str(prolog)}
    else:  # and for apptainer
        fatal = '[ "$SLURM_NODEID" = 0 ] || { echo "FATAL: no image" >&2; return 255; }'
        setup += [f'apptainer() {{ {fatal}; "${{@: -3}}"; }}']
    mounts = [{"source": "runner.py", "target": str(here.folder / "runner.py")}]
    asked = {"container": container, "image": "cpu", "setup": setup}
    started = here.starts("import sys\n" + program, mounts, **asked)
    assert started.ends() == 125, started
    told = {
        "apptainer": "FATAL: no image",
        "none": "slurmstepd-n1: error: --task-prolog failed status=1",
    }
    line = f"failed, exit code 125: node-1 didn't start: {told[container]}"
    assert any(one.endswith(line) for one in started.told()), started


def training(image: str, iterations: int, /, **slurm: Any) -> dict[str, Any]:
    """A run file of two nodes, with docker in the task unless asked for otherwise."""
    iterated = TINY["training"] | {"train_iters": iterations}
    more = {"image": image, "gpus": 0, "nodes": 2, "slurm": {"container": "docker", **slurm}}
    more["env"] = {"LAUNCHER_ALL_REDUCE_SECONDS": 600}  # of a loaded machine
    return {**TINY, "training": iterated, "checkpoint": {"save": "save"}, **more}


@pytest.mark.long
@pytest.mark.parametrize(
    "container",
    [
        "docker",
        pytest.param(
            "apptainer",
            marks=pytest.mark.skipif(not shutil.which("apptainer"), reason="no apptainer here"),
        ),
    ],
)
def test_an_image_trains_on_two_nodes(here: OnCluster, image: str, container: str) -> None:
    """Over gloo, and tells where it is; after a stop it goes on on one node of two processes."""
    asked = {"container": container}
    if container == "apptainer":  # with the site's TMPDIR as well, where torch leaves its own
        asked |= {"image": str(here.folder / "image.sif"), "setup": "unset TMPDIR"}
        archive = here.folder / "image.tar"
        subprocess.run(["docker", "save", image, "-o", archive], env=here.environment, check=True)
        build = ["apptainer", "build", asked["image"], f"docker-archive:{archive}"]
        subprocess.run(build, check=True, timeout=900)
    here.write(training(image, 100000, **asked))
    started = here.start("run", "run.yaml", "--backend", "slurm")
    started.said("iteration       20/")
    (run,) = [path.parent.name for path in (here.folder / "runs").glob("*/run.json")]
    told = here.done("stacks", run).out
    assert "node-1:\nrank 1 " in told, told
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 0, started
    at = int((here.folder / "save/latest_checkpointed_iteration.txt").read_text())
    assert at >= 20
    assert not here.containers()
    ends = ["--set", f"training.train_iters={at + 2}", "--set", "nodes=1", "--processes", "2"]
    again = here.done("resume", run, *ends)
    assert again.process.returncode == 0, again
    assert [int(number) for number, _ in LOSS.findall(again.out)] == [at + 1, at + 2]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_an_option_starts_in_an_image_with_its_package_and_nowhere_else(
    here: OnCluster, cpu_images: CpuImages, image: str
) -> None:
    """Where the image has W&B, the plan, the node and the program must all see it."""
    locks = here.folder / "locks"
    shutil.copytree(ROOT / "extras", locks)
    own = replace(cpu_images, site=replace(cpu_images.site, extras=locks))
    having = own.build(extras=("wandb",))
    wandb = {"wandb_project": "p", "wandb_exp_name": "e", "wandb_save_dir": "wandb"}
    config = {"logging": {**TINY["logging"], **wandb}, "env": {"WANDB_MODE": "offline"}}
    here.write(training(image, 2) | config)
    refused = here.done("run", "run.yaml", "--backend", "slurm")
    assert refused.process.returncode == 121, refused
    assert "logging.wandb_project: p needs the Python package wandb, which isn't in" in refused.err
    assert "pip install wandb" in refused.err
    assert not list((here.folder / "runs").glob("*/job.sh"))
    here.write(training(having, 2) | config)
    started = here.start("run", "run.yaml", "--backend", "slurm")
    assert started.ends(900) == 0, started
    (run,) = (here.folder / "wandb").rglob("offline-run-*/*.wandb")
    assert b"lm loss" in run.read_bytes()


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_a_job_that_is_requeued_learns_the_same(here: OnCluster, image: str) -> None:
    """However fast the machine is: Slurm's own signal would come before, within or after it."""
    here.write(training(image, 60))
    whole = here.start("run", "run.yaml", "--backend", "slurm")
    assert whole.ends(1000) == 0, whole
    here.write(training(image, 60, requeue=True) | {"checkpoint": {"save": "parts"}})
    parts = here.start("run", "run.yaml", "--backend", "slurm")
    parts.said("iteration       10/")
    at_its_limit(here)
    assert parts.ends(1000) == 0, parts
    assert "waits: BeginTime" in parts.err
    assert dict(LOSS.findall(parts.out))["60"] == dict(LOSS.findall(whole.out))["60"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_at_its_time_limit_a_job_is_requeued(here: OnCluster) -> None:
    """Slurm sends its signal up to a minute early, and holds a requeued job for two."""
    ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
    program = (
        f"import os, signal, sys, time\n{ends}print('start', os.environ['restart'], flush=True)\n"
        "time.sleep(600 if os.environ['restart'] == '0' else 0)\n"
    )
    started = here.starts(program, nodes=1, save="save", time="2", signal=60, requeue=True)
    assert started.ends(600) == 0, started
    assert "waits: BeginTime" in started.err
    assert started.out == "start 0\nstart 1\n"


@pytest.mark.long
def test_a_job_that_is_cancelled_is_not_requeued(here: OnCluster) -> None:
    """It came back: its script is asked to stop, too, which it took for its time limit."""
    started = here.starts(STARTS, nodes=1, save="save", requeue=True)
    started.said("start 0\n")
    (job,) = here.asked("squeue", "--noheader", "--states=running", "--format=%A").split()
    here.asked("scancel", job)
    assert started.ends() not in (0, None), started
    assert started.out == "start 0\n"
