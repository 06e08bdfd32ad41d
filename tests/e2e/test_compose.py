"""Runs of several nodes as compose projects on a real engine, and of one."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from launcher.runs.backends.docker.docker_job import PROJECT
from tests.e2e.site import Site, Started, leaves_to_others, standin, until

if TYPE_CHECKING:
    from docker.models.containers import Container

pytestmark = pytest.mark.engine

MEETING = """\
# Meets the other nodes as ranks do, then counts until it is asked to stop.
import os, signal, socket, sys, time
rank, nodes = int(os.environ["PET_NODE_RANK"]), int(os.environ["PET_NNODES"])
meeting = (os.environ["PET_MASTER_ADDR"], int(os.environ["PET_MASTER_PORT"]))
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if rank == 0:
    server = socket.create_server(("", meeting[1]))
    peers = [server.accept()[0] for _ in range(nodes - 1)]
else:
    peers = [socket.create_connection(meeting)]
print("met as", rank, flush=True)
"""
COUNTING = """\
while not asked:
    print("line", flush=True)
    time.sleep(0.05)
print("asked", file=sys.stderr, flush=True)
sys.exit(7)
"""
FAILING = """\
if rank == 1:
    print("runner: rank 1 exited with code 3", file=sys.stderr, flush=True)
    sys.exit(3)
print("waiting for rank 1", flush=True)
while True:
    time.sleep(1)
"""
FAILING_ONCE = """\
if rank == 1 and not os.path.exists("/kept/tried"):
    open("/kept/tried", "w").close()
    sys.exit(3)
"""


@pytest.fixture(autouse=True)
def _no_network_left(here: Site) -> Iterator[None]:
    yield
    assert here.end() == networks(here) == []


def networks(site: Site) -> list[str]:
    """The networks of the site's projects."""
    found = site.client.networks.list(filters={"label": PROJECT})
    return [one.name for one in found if one.name.startswith(site.name)]


def two(image: str, **more: Any) -> dict[str, Any]:
    """Two nodes of ./program.py with the stand-in runner."""
    return standin(image, network=None) | {"nodes": 2} | more


def node(site: Site, rank: int) -> Container:
    """A node's container, as soon as it runs."""

    def running() -> list[Container]:
        found = [one for one in site.containers() if one.status == "running"]
        return [one for one in found if one.labels["megatron-launchpad.node"] == str(rank)]

    return until(running, f"node {rank} doesn't run")[0]


@pytest.fixture
def counting(here: Site, python_image: str) -> Site:
    """Where two nodes count until they are asked to stop, and then exit with 7."""
    here.write(two(python_image), MEETING + COUNTING)
    return here


def counted(text: str) -> None:
    """Both nodes have written whole lines, each with its name before it."""
    for rank in (0, 1):
        assert f"node-{rank} | met as {rank}\n" in text
        assert f"node-{rank} | line\n" in text
    assert re.fullmatch(r"(node-[01] \| (met as [01]|line)\n)*", text)


def test_nodes_meet_by_name_and_stop_when_asked(counting: Site) -> None:
    started = counting.start("run", "run.yaml", "--backend", "compose")
    started.said("node-1 | line")
    run = counting.run()
    assert len(networks(counting)) == 1
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 7
    counted(started.out)
    for rank in (0, 1):
        assert f"node-{rank} | asked\n" in started.err
    assert re.fullmatch(rf"run {run} stopped, exit code 7: on node-[01]", started.told()[1])
    assert (counting.folder / "runs" / run / "compose.yaml").exists()


@pytest.mark.long
def test_nodes_without_a_network_meet_in_one_that_leads_nowhere(
    here: Site, python_image: str
) -> None:
    """`network: none`, as gpt2-tiny.yaml has it, was refused for several nodes."""
    config = standin(python_image) | {"nodes": 2}
    started = here.launch(config, MEETING + COUNTING, "--backend", "compose")
    started.said("node-1 | line")
    (name,) = networks(here)
    assert here.client.networks.get(name).attrs["Internal"] is True
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 7
    counted(started.out)


@pytest.mark.long
def test_a_killed_launcher_leaves_the_run_to_others(counting: Site) -> None:
    start = ("--backend", "compose")
    counted(leaves_to_others(counting, *start, run=counting.run, first="node-1 | line").out)


def test_the_others_start_though_the_launcher_was_killed_before(counting: Site) -> None:
    program = MEETING.replace("if rank == 0:", "if rank == 0:\n    time.sleep(3)")
    (counting.folder / "program.py").write_text(program + COUNTING)
    first = counting.start("run", "run.yaml", "--backend", "compose")
    node(counting, 0)
    first.process.kill()
    first.ends()
    node(counting, 1)
    assert counting.done("stop", counting.run()).process.returncode == 0
    assert counting.done("attach", counting.name).process.returncode == 7


def test_a_stop_is_heard_before_the_nodes_have_met(here: Site, python_image: str) -> None:
    program = "import time\nprint('here', flush=True)\ntime.sleep(600)\n"
    started = here.launch(two(python_image), program, "--backend", "compose")
    started.said("node-0 | here")
    started.process.send_signal(signal.SIGTERM)
    assert started.ends() == 143
    assert "node-1" not in started.out


def test_the_first_node_to_fail_is_named_and_ends_the_others(here: Site, python_image: str) -> None:
    started = here.launch(two(python_image), MEETING + FAILING, "--backend", "compose")
    started.said("node-0 | waiting")
    run = here.run()
    assert started.ends() == 3
    assert started.told() == [f"run {run} failed: node-1: rank 1 exited with code 3"]


def test_a_node_that_never_waits_for_others_is_told(here: Site, python_image: str) -> None:
    started = here.launch(two(python_image), "print('alone')\n", "--backend", "compose")
    assert started.ends() == 125
    (told,) = started.told()
    assert "node-1 didn't start: node-0 ended before its port was open" in told


@pytest.mark.parametrize("backend", [pytest.param("docker", marks=pytest.mark.long), "compose"])
def test_devices_and_capabilities_are_in_the_container(
    here: Site, python_image: str, backend: str
) -> None:
    """A folder of devices as well, as InfiniBand's is; IPC_LOCK is the bit 14."""
    program = (
        "import os\n"
        "bits = open('/proc/self/status').read().split('CapEff:')[1].split()[0]\n"
        "print(os.path.exists('/dev/mine'), os.path.exists('/dev/net/tun'))\n"
        "print(int(bits, 16) >> 14 & 1)\n"
    )
    config, tun = standin(python_image), os.path.exists("/dev/net/tun")
    devices = ["/dev/zero:/dev/mine", *(["/dev/net"] if tun else [])]
    config["resources"] = {"devices": devices, "cap_add": ["IPC_LOCK"]}
    started = here.launch(config, program, "--backend", backend)
    assert (started.ends(), started.out) == (0, f"True {tun}\n1\n"), started


def test_what_the_engine_refuses_leaves_nothing(here: Site, python_image: str) -> None:
    more = ("--backend", "compose", "--no-preflight")
    started = here.launch(two(python_image, gpus=1), MEETING, *more)
    assert started.ends() == 125, started
    assert "can't give GPUs" in started.err
    assert here.containers() == []
    assert networks(here) == []


# Real training: DP=2, within a node or over two of them, by Megatron-Core on gloo.
TRAINING = {
    "program": "gpt",
    "gpus": 0,
    "env": {"LAUNCHER_ALL_REDUCE_SECONDS": 300},  # on a machine that is busy with other things
    "model": {
        **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 64},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "make_vocab_size_divisible_by": 8},
    },
    "training": {
        **{"micro_batch_size": 4, "global_batch_size": 16, "train_iters": 3, "lr": 1e-3},
        "seed": 7,
    },
    "data": {"mock": True, "vocab_size": 257},
    "logging": {"log_interval": 1},
}
STEP = re.compile(r"iteration +(\d+)/.* lm loss: (\S+) .* grad norm: (\S+) ")


def steps(started: Started) -> list[tuple[str, ...]]:
    """Iteration, loss and norm of the gradient of each step, as printed."""
    assert started.ends() == 0, started
    return [match.groups() for match in STEP.finditer(started.out)]


@pytest.mark.long  # that containers meet and train is in test_train_in_image and agent/test_alike
def test_two_nodes_learn_what_one_does(here: Site, image: str) -> None:
    here.write({"image": {"name": image}, **TRAINING})
    one = steps(here.start("run", "run.yaml", "--no-preflight", "--set", "processes=2"))
    both = ("--backend", "compose", "--nodes", "2", "--set", "processes=1")
    started = here.start("run", "run.yaml", *both)
    assert [step[0] for step in one] == [str(n) for n in range(1, 4)]
    assert steps(started) == one
    assert set(re.findall(r"^node-\d", started.out, re.MULTILINE)) <= {"node-0", "node-1"}


def test_a_killed_node_is_the_first_cause(counting: Site) -> None:
    started = counting.start("run", "run.yaml", "--backend", "compose")
    started.said("node-1 | line")
    run = counting.run()
    node(counting, 1).kill()
    assert started.ends() == 137
    assert started.told() == [
        f"run {run} failed, exit code 137: node-1: killed from outside, by SIGKILL"
    ]
    assert counting.containers() == []
    assert networks(counting) == []


@pytest.mark.long
def test_tensorboard_shows_the_run_and_goes_with_it(here: Site, image: str) -> None:
    """The image has none, so the service ends at once: nothing to the run."""
    logging = {"log_interval": 1, "tensorboard_dir": "board"}
    config = {**TRAINING, "logging": logging, "processes": 2, "resources": {"network": "none"}}
    here.write({"image": {"name": image}, **config})
    more = ("--set", "training.train_iters=20")
    started = here.start("run", "run.yaml", "--backend", "compose", *more)
    started.said("iteration        1/")
    project = here.container().labels[PROJECT]
    found = here.client.containers.list(all=True, filters={"label": f"{PROJECT}={project}"})
    boards = [one for one in found if one.labels["com.docker.compose.service"] == "tensorboard"]
    (ports,) = (one.attrs["HostConfig"]["PortBindings"]["6006/tcp"] for one in boards)
    assert ports[0]["HostIp"] == "127.0.0.1"
    assert started.ends() == 0
    left = here.client.containers.list(all=True, filters={"label": f"{PROJECT}={project}"})
    assert (left, networks(here)) == ([], [])


def test_a_failed_run_starts_again_with_all_nodes(here: Site, python_image: str) -> None:
    config = two(python_image)
    kept = {"source": "kept", "target": "/kept", "read_only": False}
    here.write(config | {"mounts": [*config["mounts"], kept]}, MEETING + FAILING_ONCE)
    started = here.start("run", "run.yaml", "--backend", "compose", "--max-restarts", "1")
    assert started.ends() == 0, started
    for rank in (0, 1):
        assert started.out.count(f"node-{rank} | met as {rank}\n") == 2
    assert "starting it again: 1 of 1 times" in started.told()
