"""Every way that a run can end, with a real engine: told for what it was, and nothing is left."""

from __future__ import annotations

import fcntl
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from launcher.agent.checkpoints import folders
from launcher.base import owned
from launcher.base.settings import Settings
from launcher.images.engine.client import Client
from launcher.images.engine.connect import engine_host
from launcher.images.engine.private import packages, private
from launcher.runs.explain.failures import OPEN
from launcher.tools.weights import torch_file
from tests.e2e.registry import listener
from tests.e2e.site import (
    ONE_THREAD,
    WITHIN,
    Site,
    Started,
    leaves_to_others,
    make_site,
    script,
    standin,
    until,
)

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container

pytestmark = pytest.mark.engine

COUNTER = """\
import signal, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
n = 0
while not asked:
    print("line", n, flush=True)
    n += 1
    time.sleep(0.05)
print("saved after", n, flush=True)
sys.exit(7)
"""
DEAF = """\
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def counting(here: Site, python_image: str) -> Site:
    """Where a run counts until it is asked to stop, and then exits with 7."""
    here.write(standin(python_image), COUNTER)
    return here


def counted(text: str) -> int:
    """How many lines the counter has written, all of them from the first, and then the last."""
    *lines, last = text.splitlines()
    assert lines == [f"line {n}" for n in range(len(lines))]
    assert last == f"saved after {len(lines)}"
    return len(lines)


@pytest.mark.parametrize(
    "signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_the_first_signal_is_a_request(counting: Site, signum: int) -> None:
    started = counting.start("run", "run.yaml")
    started.said("line 3\n")
    run = counting.run()
    started.process.send_signal(signum)
    assert started.ends() == 7
    assert counted(started.out) > 3
    assert started.told() == [
        "asked the run to stop; it has 60 s. Ctrl-C again ends it at once.",
        f"run {run} stopped, exit code 7",
    ]


def test_the_second_signal_ends_the_run(here: Site, python_image: str) -> None:
    started = here.launch(standin(python_image), DEAF)
    started.said("ready")
    run = here.run()
    started.process.send_signal(signal.SIGINT)
    started.said("asked the run to stop")
    assert started.process.poll() is None
    started.process.send_signal(signal.SIGINT)
    assert started.ends() == 137
    assert started.told()[1:] == [f"run {run} stopped, exit code 137"]


def test_a_killed_launcher_leaves_the_run_to_others(counting: Site) -> None:
    follower = leaves_to_others(counting, run=counting.run, first="line 2\n")
    assert counted(follower.out) > 2


def test_a_run_that_ended_with_nobody_watching_is_kept_for_attach(counting: Site) -> None:
    run = counting.done("run", "run.yaml", "--detach").out.strip()
    until(lambda: "line 0" in counting.done("logs", run).out)  # by then it takes the signal
    stopped = counting.done("stop", run)
    assert stopped.process.returncode == 0, stopped
    assert stopped.told()[-1].endswith(f"launcher attach {run}")
    assert f"{run}" in counting.done("ps", "-q").out.split()
    assert "ended (7)" in counting.done("ps").out
    counted(counting.done("logs", run).out)
    attached = counting.done("attach", run)
    counted(attached.out)
    assert attached.process.returncode == 7


@pytest.mark.parametrize(
    "deaf", [False, pytest.param(True, marks=pytest.mark.long)], ids=["hung up", "nohup"]
)
def test_a_lost_terminal_leaves_the_run(counting: Site, deaf: bool) -> None:
    near, far = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if deaf:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    first = counting.start(
        *("run", "run.yaml"),
        **{"stdin": far, "stdout": far, "stderr": far},
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(far)
    seen = b""
    while b"line 2" not in seen:
        seen += os.read(near, 1 << 10)
    run = counting.run()
    os.close(near)
    assert first.ends() != 0  # by SIGHUP, or by a write that comes upon the closed terminal first
    assert counting.container().status == "running"
    follower = counting.start("attach", run)
    follower.said("line 2\n")
    follower.process.send_signal(signal.SIGTERM)
    assert follower.ends() == 7
    assert counted(follower.out) > 2


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        pytest.param(
            *(lambda one: one.kill(), "killed from outside, by SIGKILL"), marks=pytest.mark.long
        ),
        (lambda one: one.remove(force=True), "it was removed from outside"),
    ],
    ids=["docker kill", "docker rm -f"],
)
def test_an_end_from_outside_is_told_as_one(
    counting: Site, end: Callable[[Container], None], reason: str
) -> None:
    started = counting.start("run", "run.yaml")
    started.said("line 2\n")
    run = counting.run()
    end(counting.container())
    assert started.ends() == 137
    assert started.told() == [f"run {run} failed, exit code 137: {reason}"]


def test_restarts_are_used_up_and_the_last_exit_code_is_passed_on(
    here: Site, python_image: str
) -> None:
    program = "import sys; print('began', flush=True); sys.exit(5)"
    done = here.launch(standin(python_image), program, "--max-restarts", "2")
    assert (done.ends(), done.out) == (5, "began\n" * 3)
    failed, again, *rest = done.told()
    assert failed.endswith("failed, exit code 5")
    assert again == "starting it again: 1 of 2 times"
    assert rest == [failed, "starting it again: 2 of 2 times", failed]


# A real runner from here on.

AS_RANK_1 = "import os, signal, sys, time\nif os.environ['RANK'] != '1': time.sleep(600)\n"


@pytest.mark.parametrize(
    ("program", "code", "said"),
    [
        pytest.param("sys.exit(3)", 3, "rank 1 exited with code 3", marks=pytest.mark.long),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 1 was killed by signal 9 (SIGKILL), exit code 137",
        ),
    ],
)
def test_a_failed_rank_is_told_with_its_exit_code(
    here: Site, image: str, program: str, code: int, said: str
) -> None:
    done = here.launch(script(image), AS_RANK_1 + program)
    assert done.ends() == code, done
    told, *clues = done.told()
    assert re.fullmatch(rf"run \w+ failed: {re.escape(said)}", told)
    heads = [line.partition(":")[0] for line in clues if not line.startswith(" ")]
    clue = ["this points to", OPEN]  # several can send a SIGKILL
    assert heads == (clue if code == 137 else [])


GREEDY = "kept = []\nwhile True: kept.append(bytearray(b'x' * (1 << 24)))\n"


def test_the_containers_memory_limit_is_told(here: Site, image: str) -> None:
    if not here.client.info()["MemoryLimit"]:
        pytest.skip("this engine has no cgroup to limit memory by")
    done = here.launch(script(image, memory="1g"), AS_RANK_1 + GREEDY)
    assert done.ends() == 137, done
    assert "out of memory (the container's limit" in done.told()[0]


def test_a_tied_run_ends_by_itself_when_its_launcher_is_killed(here: Site, image: str) -> None:
    first = here.launch(script(image, processes=1), COUNTER, "--tie")
    first.said("line 2\n")
    run, container = here.run(), here.container()
    first.process.kill()
    container.wait(timeout=WITHIN)
    assert counted(container.logs(stderr=False).decode()) > 2
    assert "ended (7)" in here.done("ps").out
    assert here.done("attach", run).process.returncode == 7


def training(image: str) -> dict[str, Any]:
    """A tiny model on made-up data, with 60 steps of which every 20th is saved."""
    return {
        "image": {"name": image},
        **{"program": "gpt", "gpus": 0, "processes": 1},
        "env": {"PYTHONPATH": "/faults:/opt/megatron/lib:/opt/packages/lib", **ONE_THREAD},
        "mounts": [{"source": "faults", "target": "/faults", "read_only": False}],
        "model": {
            **{"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "seq_length": 32},
            **{"max_position_embeddings": 32, "make_vocab_size_divisible_by": 8},
        },
        "training": {
            **{"micro_batch_size": 2, "global_batch_size": 2, "train_iters": 60},
            **{"lr": 1.0e-3, "lr_decay_iters": 60},
        },
        "data": {"mock": True, "vocab_size": 100},
        "checkpoint": {"save": "save", "save_interval": 20},
        "logging": {"log_interval": 1, "eval_interval": 1000, "eval_iters": 0},
        "resources": {"network": "none", "stop_grace": 120},
    }


def iterations(text: str) -> list[int]:
    return [int(n) for n in re.findall(r" iteration +(\d+)/", text)]


def pasted(site: Site, told: list[str]) -> Started:
    """What the command does that a run's ending names."""
    (line,) = [line for line in told if line.startswith("to go on: ")]
    program, *arguments = shlex.split(line.removeprefix("to go on: "))
    assert program == "launcher"
    return site.done(*arguments)


def test_a_stopped_training_run_saves_and_goes_on_and_a_truncated_checkpoint_is_set_aside(
    here: Site, image: str
) -> None:
    """And a rank that is killed is started again from the newest one that is complete."""
    here.write(training(image))
    (here.folder / "faults/at").write_text("hold iteration       25/\n")
    save = here.folder / "save"
    first = here.start("run", "run.yaml")
    first.said("iteration       25/")
    run = here.run()
    first.process.send_signal(signal.SIGINT)
    first.said("asked 1 ranks to stop")
    (here.folder / "faults/go").touch()
    assert first.ends() == 0, first
    last = iterations(first.out)[-1]
    assert 25 <= last < 30
    assert first.told() == [
        f"asked the run to stop and save to {save}; it has 2 min. Ctrl-C again ends it at once.",
        f"run {run} stopped, exit code 0",
        f"newest complete checkpoint: {folders.folder(save, last)} (iteration {last})",
        f"to go on: launcher resume {run}",
    ]
    second = pasted(here, first.told())
    assert second.process.returncode == 0, second
    assert iterations(second.out) == [*range(last + 1, 61)]
    assert second.told() == []  # it has finished

    newest = folders.folder(save, 60)
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    (here.folder / "faults/at").write_text("kill iteration       50/")
    third = here.done("resume", run, "--max-restarts", "1")
    assert third.process.returncode == 0, third
    assert iterations(third.out) == [*range(41, 51), *range(41, 61)]
    assert f"an incomplete checkpoint was set aside: {newest}.incomplete" in third.told()
    failed, *rest = third.told()[-5:]
    why = "failed: rank 0 was killed by signal 9 (SIGKILL), exit code 137"
    again = failed.removeprefix("run ").removesuffix(f" {why}")
    assert failed == f"run {again} {why}"
    assert rest == [
        f"newest complete checkpoint: {folders.folder(save, 40)} (iteration 40)",
        f"to go on: launcher resume {again}",
        "starting it again: 1 of 1 times",
        f"going on from {folders.folder(save, 40)}",
    ]
    assert not folders.newest_complete(save).problem  # type: ignore[union-attr]


LOSS = re.compile(r" iteration +(\d+)/.*?lm loss: (\S+)")


def weights(folder: Path) -> dict[str, Any]:
    """Weights, optimizer, random states and progress; the index has an id of its own."""
    found = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
    assert len(found) >= 2
    return found | {"progress": torch_file.read(folder / "common.pt")["progress"]}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_ten_times_it_ends_as_if_it_had_not_been(here: Site, image: str) -> None:
    """With dropout, and tensors that two ranks share: every loss, and the bytes at the end."""
    config = training(image) | {"processes": 2, "parallel": {"tensor_model_parallel_size": 2}}
    here.write(config | {"checkpoint": {"save": "whole", "save_interval": 5}})
    whole = here.done("run", "run.yaml")
    assert whole.process.returncode == 0, whole
    kills = sorted(random.Random(13).sample(range(6, 60), 10))  # noqa: S311
    lines = [f"kill iteration {step:>8}/\n" for step in kills]
    (here.folder / "faults/at").write_text("".join(lines))
    here.write(config | {"checkpoint": {"save": "killed", "save_interval": 5}})
    done = here.start("run", "run.yaml", "--max-restarts", "10")
    assert done.ends(within=4 * WITHIN) == 0, done
    assert (here.folder / "faults/at").read_text() == ""
    losses = dict(LOSS.findall(whole.out))
    assert len(losses) == 60
    assert [(step, losses[step]) for step, _ in LOSS.findall(done.out)] == LOSS.findall(done.out)
    last = [folders.folder(here.folder / name, 60) for name in ("whole", "killed")]
    assert weights(last[0]) == weights(last[1])


@pytest.fixture
def small_disk(engine: DockerClient, tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB, mounted for the launcher and, where that is elsewhere, the engine."""
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("mounting a file system needs root and loop devices")
    image, folder = tmp_path / "disk", tmp_path / "save"
    folder.mkdir()
    image.touch()
    os.truncate(image, 16 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", image], check=True)
    attach = ["losetup", "--find", "--show", str(image)]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    theirs = listener(engine_host(engine))
    there = ["nsenter", f"--target={theirs}", "--mount", "--pid"]
    apart = not os.path.samefile(f"/proc/{theirs}/ns/mnt", "/proc/self/ns/mnt")
    mounted: list[list[str]] = []
    try:
        for prefix in [[], there] if apart else [[]]:
            subprocess.run([*prefix, "mount", device, folder], check=True)
            mounted.append(prefix)
        yield folder
    finally:
        for prefix in mounted:
            subprocess.run([*prefix, "umount", "--lazy", folder], check=True)
        subprocess.run(["losetup", "--detach", device], check=True)


def fill(path: Path) -> None:
    """Write to a file until its disk is full."""
    with path.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(1 << 12))


def test_a_full_disk_is_told_and_the_checkpoint_before_it(
    small_disk: Path, here: Site, image: str
) -> None:
    here.write(training(image))
    (here.folder / "faults/at").write_text("hold iteration       25/\n")
    started = here.start("run", "run.yaml")
    started.said("iteration       25/")
    run = here.run()
    fill(small_disk / "filler")
    (here.folder / "faults/go").touch()
    assert started.ends() == 1, started
    assert started.told() == [
        f"run {run} failed, exit code 1: a disk is full",
        f"see what is free where it saves: {small_disk}",
        f"newest complete checkpoint: {folders.folder(small_disk, 20)} (iteration 20)",
        f"to go on: launcher resume {run}",
    ]
    assert [*small_disk.glob("*.partial")] == []


# An engine of its own from here on, which ends and starts again.

KEEPER = """\
# First process of an engine's namespaces: ends it in order or kills it, and starts it again, as
# its standard input says. It collects every process, as the engine looks for those of its last.
import os, signal, sys, time
ended = set()

def reap(*_):
    try:
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    except ChildProcessError:
        return

def start():
    none = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[none])

def end(signum):
    os.kill(engine, signum)
    while engine not in ended:
        time.sleep(0.02)

signal.signal(signal.SIGCHLD, reap)
engine = start()
for line in sys.stdin:
    end(signal.Signals[line.strip()])
    engine = start()
end(signal.SIGTERM)
"""


@dataclass
class MortalEngine:
    """An engine that can be ended, and comes back."""

    client: DockerClient
    keeper: subprocess.Popen[str]

    def restart(self, signum: signal.Signals) -> None:
        assert self.keeper.stdin
        self.keeper.stdin.write(f"{signum.name}\n")
        self.keeper.stdin.flush()


@pytest.fixture(scope="module")
def mortal(site: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalEngine]:
    """An engine of this module's own, with the launcher's packages."""
    if reason := private.unsupported():
        pytest.skip(f"private engine: {reason}")
    folder = tmp_path_factory.mktemp("engine")
    unpacked = site.cache / "engine/packages"
    packages.unpack(unpacked, private.WANTED, private.OPTIONAL)
    (folder / "packages").symlink_to(unpacked)
    sockets = Path(tempfile.mkdtemp(prefix="launchpad-", dir=private._short_folder()))
    owned.mark(sockets)
    place = private.EnginePlace(folder, sockets)
    (sockets / "packages").symlink_to(unpacked)
    place.settings.write_text("{}")
    namespaces = ["--pid", "--fork", "--kill-child", "--mount-proc", "--net", "--mount"]
    argv = ["unshare", *namespaces, "--propagation", "slave", sys.executable, "-c", KEEPER]
    with place.log.open("wb") as log:
        keeper = subprocess.Popen(
            [*argv, *private._engine_argv(place), "--bridge=none"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            env=packages.environment(unpacked),
            start_new_session=True,
        )
    try:
        until(lambda: private._answers(place), f"no engine: {place.log}")
        client = Client(place.host, timeout=60)
        yield MortalEngine(client, keeper)
        client.close()
    finally:
        assert keeper.stdin
        keeper.stdin.close()
        try:
            keeper.wait(60)
        except subprocess.TimeoutExpired:
            keeper.kill()  # with it goes everything in its namespaces
            keeper.wait()
        private._clean(place)


@pytest.fixture
def there(mortal: MortalEngine, tmp_path: Path) -> Iterator[Site]:
    """On that engine, which has an image of links alone: for a container with this /usr."""
    site = make_site(tmp_path / "site", mortal.client)
    links = tmp_path / "links"
    links.mkdir()
    for name in ("bin", "lib", "lib64"):
        (links / name).symlink_to(f"usr/{name}")
    tar = subprocess.run(["tar", "-C", links, "-c", "."], check=True, capture_output=True).stdout
    mortal.client.api.import_image_from_data(tar, repository="hollow", tag="1")
    yield site
    assert site.end() == []


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)]
)
def test_a_restarted_engine_is_waited_for_and_told(
    mortal: MortalEngine, there: Site, signum: signal.Signals
) -> None:
    config = standin("hollow:1")
    config["mounts"].append({"source": "/usr", "target": "/usr"})
    config["env"] = {"PATH": "/usr/bin"}
    started = there.launch(config, COUNTER, "--max-restarts", "1")
    started.said("line 3\n")
    run = there.run()
    mortal.restart(signum)
    started.said("starting it again: 1 of 1 times")
    first = started.out
    until(lambda: started.out.count("line 3\n") == 2, started)
    started.process.send_signal(signal.SIGTERM)
    assert started.ends() == 7, started
    if signum == signal.SIGTERM:
        counted(first)  # each line once, to the last
    told = started.told()
    assert re.search(rf"run {run} failed, exit code \d+: the engine was restarted", str(told))
    assert told[-1] == f"run {run} stopped, exit code 7"
