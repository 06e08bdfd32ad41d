"""Runs of `--backend local`, as people in a container start them.

test_train_in_image.py runs these tests inside the CPU image.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.agent.ranks.command_line import free_port
from launcher.base.settings import ROOT
from tests.conftest import missing

RUN_FILE = """\
name: local-test
image: cpu
gpus: 0
processes: 2
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 32,
  max_position_embeddings: 32, hidden_dropout: 0.0, attention_dropout: 0.0,
  make_vocab_size_divisible_by: 8}
training: {micro_batch_size: 2, global_batch_size: 4, train_iters: 100000, lr: 1.0e-3, seed: 1}
parallel: {tensor_model_parallel_size: 2}
data: {mock: true, vocab_size: 100}
checkpoint: {save: out/save}
logging: {log_interval: 1, eval_interval: 1000000, eval_iters: 1}
"""

WAITS = "name: local-test\nimage: cpu\ngpus: 0\nprocesses: 2\nprogram: ./waits.py\n"


needs_megatron = pytest.mark.skipif(
    bool(missing("torch", "megatron.core")),
    reason="torch and megatron.core can't both be imported here",
)


def trains(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that trains."""
    marked: Callable[..., None] = pytest.mark.megatron(needs_megatron(test))
    return marked


class Launchers:
    """Starts launchers in a folder that holds the run file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "LAUNCHER_RUNS": str(folder / "runs"),
        }
        self.going: list[subprocess.Popen[str]] = []

    def start(self, *args: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "launcher", *args],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        self.going.append(process)
        return process

    def run(self, *args: str) -> subprocess.Popen[str]:
        """A run, once it trains."""
        process = self.start("run", "--backend", "local", "run.yaml", *args)
        assert process.stdout
        for line in process.stdout:
            if " iteration " in line:
                return process
        pytest.fail(process.communicate()[1])

    def __call__(self, *args: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*args)
        out, err = process.communicate(timeout=600)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    def ps(self) -> list[str]:
        return self("ps", "-q").stdout.split()

    def ranks(self) -> dict[int, str]:
        """The commands of its runners, ranks and keepers that go on, by process; nobody else's."""
        found, mark = {}, f"LAUNCHER_RUNS={self.folder / 'runs'}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    words = path.with_name("cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(path.parent.name)] = words.decode(errors="replace")
        wanted = re.compile(r"launcher\.train|launcher/agent|backends import keeper")
        return {process: words for process, words in found.items() if wanted.search(words)}


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    """Starts launchers; afterwards neither a process nor a file of a run's output may be left."""
    (tmp_path / "run.yaml").write_text(RUN_FILE)
    started = Launchers(tmp_path)
    yield started
    for process in started.going:
        process.kill()
        process.communicate()
    for run in started.ps():
        started("stop", "--now", run)
        started("stop", run)
        pytest.fail(f"{run} was left")
    assert started.ranks() == {}
    left = {path.name for path in (tmp_path / "runs").glob("*/*")}
    assert left & {"process.json", "stdout", "stderr", "code", "lost"} == set()


def saved(folder: Path) -> int:
    """The iteration of the newest checkpoint."""
    return int((folder / "out/save/latest_checkpointed_iteration.txt").read_text())


@trains
def test_it_outlives_its_launcher_is_found_and_goes_on_in_another_layout(
    launchers: Launchers, tmp_path: Path
) -> None:
    process = launchers.run()
    process.kill()
    process.wait()
    (run,) = launchers.ps()
    assert " running  local " in launchers("ps").stdout
    assert " iteration        1/" in launchers("logs", run).stdout
    done = launchers("exec", run, "--", "sh", "-c", 'echo "$PWD"; exit 5')
    assert (done.returncode, done.stdout) == (5, f"{tmp_path}\n")

    follower = launchers.start("attach", "local-test")
    assert follower.stdout
    assert any(" iteration        1/" in line for line in follower.stdout)
    follower.send_signal(signal.SIGINT)
    _, err = follower.communicate(timeout=600)
    at = saved(tmp_path)
    assert follower.returncode == 0
    assert f"run {run} stopped, exit code 0" in err
    assert f"{tmp_path}/out/save/iter_{at:07d} (iteration {at})" in err

    more = ("--set", f"training.train_iters={at + 2}", "--set", "training.lr_decay_iters=100000")
    done = launchers("resume", run, "--processes", "1", *more)
    assert done.returncode == 0, done.stderr
    assert (
        "launcher: layout: TP=2 PP=1 DP=1 -> TP=1 PP=1 DP=1; the global batch stays 4"
        in done.stderr
    )
    steps = re.findall(r" iteration +(\d+)/", done.stdout)
    assert steps == [str(at + 1), str(at + 2)]
    assert saved(tmp_path) == at + 2


@trains
@pytest.mark.long
def test_a_run_with_a_rank_that_the_kernel_holds_is_ended(launchers: Launchers) -> None:
    """Such a rank answers neither the watchdog nor SIGTERM, and the other waits for it."""
    within = ("watchdog.timeout=5", "watchdog.action=end", "checkpoint.save=null")
    process = launchers.run(*(word for key in within for word in ("--set", key)))
    held = next(
        number
        for number, words in launchers.ranks().items()
        if "gpt" in words and b"\0RANK=1\0" in Path(f"/proc/{number}/environ").read_bytes()
    )
    os.kill(held, signal.SIGSTOP)
    _, err = process.communicate(timeout=600)
    assert process.returncode not in (0, 2), err
    assert re.search(r"no output for \d+ s: rank 1 doesn't answer: the kernel has it as T", err)
    assert "ending it, as watchdog.action says" in err
    assert launchers.ranks() == {}


@trains
def test_the_ranks_end_with_a_runner_that_is_killed(launchers: Launchers, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text("import time\nprint(' iteration ')\ntime.sleep(600)\n")
    (tmp_path / "run.yaml").write_text(WAITS)
    process = launchers.run()
    (runner,) = (
        process
        for process, words in launchers.ranks().items()
        if "/launcher/agent/start.py runner " in words and "keeper" not in words
    )
    os.kill(runner, signal.SIGKILL)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 137
    assert "failed, exit code 137" in err
    assert launchers.ranks() == {}


@pytest.mark.long
@trains
def test_the_fastest_setting_is_found_written_and_kept(
    launchers: Launchers, tmp_path: Path
) -> None:
    few = ("--steps", "5", "--set", "parallel.tensor_model_parallel_size=1")
    few = (*few, "--set", "processes=1", "--set", "training.global_batch_size=2")
    tune = ("tune", "--backend", "local", "run.yaml", *few, "--set", "training.micro_batch_size=1")
    done = launchers(*tune)
    assert done.returncode == 0, done.stderr
    assert re.search(r"TFLOP/s on each of 1, \d+ % of the", done.stdout)
    assert "what holds it back most: " in done.stdout
    rows = re.findall(r"^ +([\d.]+) {10}(as given|micro_batch_size 2)$", done.stderr, re.M)
    assert [name for _, name in rows] == ["as given", "micro_batch_size 2"]
    written = tmp_path / "local-test-tuned.yaml"
    faster = "2" if float(rows[1][0]) < 0.99 * float(rows[0][0]) else "1"
    assert f"micro_batch_size: {faster}, global_batch_size: 2" in written.read_text()
    assert not (tmp_path / "out").exists()
    assert launchers("run", "--backend", "local", written.name, "--dry-run").returncode == 0
    assert "is there already" in launchers(*tune).stderr


PLANTED = """\
import importlib.abc, importlib.util, os, sys

class Planter(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "launcher.trainer.gpt.samples":
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        whole = found.loader.exec_module
        found.loader.exec_module = lambda module: whole(module) or plant(module.MockDataset)
        return found

def plant(dataset):
    whole, (kind, at) = dataset.__getitem__, os.environ["PLANTED"].split()
    def sample(self, index):
        found = whole(self, index)
        if self.samples > 4 and index // 4 + 1 == int(at):
            if kind == "nan":
                found["loss_mask"][0] = float("nan")
            else:
                found["labels"] = (found["labels"] + 50) % self.vocab_size
        return found
    dataset.__getitem__ = sample

sys.meta_path.insert(0, Planter())
"""
"""A stand-in for data with one bad batch, which it is whenever it is read."""


def sets(*values: str) -> list[str]:
    """What starts a run of one process that has these set."""
    one = ("processes=1", "parallel.tensor_model_parallel_size=1", *values)
    return ["run", "--backend", "local", "run.yaml", *(f"--set={each}" for each in one)]


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    """By iteration, as the last attempt told them."""
    assert done.returncode == 0, done.stderr
    told = re.findall(r" iteration +(\d+)/.* lm loss: (\S+) ", done.stdout)
    return {int(iteration): float(loss) for iteration, loss in told}


@pytest.mark.long
@trains
@pytest.mark.parametrize("kind", ["nan", "spike"])
def test_a_run_goes_back_past_a_bad_batch(launchers: Launchers, tmp_path: Path, kind: str) -> None:
    """Its losses are those of a run that never saw it, and end near those of an undisturbed one."""
    few, unsaved = ("training.train_iters=60", "training.lr=1e-2"), "checkpoint.save=null"
    skipped = launchers(*sets(*few, unsaved, "megatron_args.iterations_to_skip=[29, 30]"))
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    path = f"{tmp_path}{os.pathsep}{launchers.env['PYTHONPATH']}"
    launchers.env |= {"PYTHONPATH": path, "PLANTED": f"{kind} 30"}
    back = launchers(*sets(*few, "checkpoint.save_interval=20", f"guard.on_{kind}=rewind"))
    told = [line for line in back.stderr.splitlines() if "guard: " in line or "going back" in line]
    assert told[0].startswith(f"launcher: guard: {kind} at iteration 30: ")
    passed = "launcher: going back to iteration 20, past the batches of iterations 29 to 30"
    assert told[1:] == [passed]
    assert [losses(back)[n] for n in range(31, 61)] == [losses(skipped)[n] for n in range(31, 61)]
    assert "guard: " not in skipped.stderr
    if kind == "spike":
        (tmp_path / "sitecustomize.py").unlink()
        well = launchers(*sets(*few, unsaved))
        assert losses(back)[60] == pytest.approx(losses(well)[60], abs=0.02)


@trains
@pytest.mark.long
def test_a_loss_that_stands_still_ends_the_run(launchers: Launchers) -> None:
    """The rate is 0 from iteration 20 on, and every step has the same batch."""
    still = ("training.lr_decay_iters=20", "training.min_lr=0", "megatron_args.mock_samples=4")
    done = launchers(*sets(*still, "guard.on_flat=end", "checkpoint.save=null"))
    assert "guard: flat at iteration 23: " in done.stderr
    assert done.returncode != 0


@trains
@pytest.mark.long
def test_nodes_by_hand_save_to_one_folder(launchers: Launchers, tmp_path: Path) -> None:
    """Only the first node's ranks knew the name: the others' shards stayed in a folder beside."""
    launchers.env["GLOO_SOCKET_IFNAME"] = "lo"
    nodes = (f"nodes.master_port={free_port()}", "nodes.master_addr=127.0.0.1", "nodes.count=2")
    split = "parallel.tensor_model_parallel_size=2"
    line = sets(split, "training.train_iters=2", "checkpoint.save=both", *nodes)
    other = launchers.start(*line, "--node-rank", "1")
    first = launchers(*line, "--node-rank", "0")
    assert (first.returncode, other.wait(600)) == (0, 0), first.stderr
    assert {path.name for path in (tmp_path / "both").glob("*")} >= {"iter_0000002"}
    assert {path.name[:4] for path in tmp_path.glob("both/*/*.distcp")} == {"__0_", "__1_"}
    assert not [*tmp_path.glob("both/*.partial")]
    assert "newest checkpoint: " in first.stderr


@trains
@pytest.mark.long
def test_nodes_by_hand_go_on_without_one_that_is_killed(
    launchers: Launchers, tmp_path: Path
) -> None:
    """From the newest complete checkpoint, once the others have waited for it."""
    launchers.env["GLOO_SOCKET_IFNAME"] = "lo"
    text = RUN_FILE.replace("processes: 2", "processes: 1\nmax_restarts: 1")
    text = text.replace("save: out/save", "save: out/save, save_interval: 2")
    text = text.replace("parallel: {tensor_model_parallel_size: 2}\n", "")
    nodes = f"nodes: {{count: 2, min: 1, master_addr: 127.0.0.1, master_port: {free_port()}}}\n"
    (tmp_path / "run.yaml").write_text(text + nodes)
    other = launchers.start("run", "--backend", "local", "run.yaml", "--node-rank", "1")
    line = ["run", "--backend", "local", "run.yaml", "--node-rank", "0"]
    first = launchers.start(*line, stderr=subprocess.STDOUT)
    said = ""

    def until(text: str) -> None:
        nonlocal said
        assert first.stdout
        for line in first.stdout:
            said += line
            if text in line:
                return
        pytest.fail(said)

    until("saved ")
    told = [json.loads(path.read_text()) for path in tmp_path.glob("runs/*/process.json")]
    (runner,) = [one for one in told if one["labels"]["megatron-launchpad.node"] == "1"]
    other.kill()
    os.kill(runner["process"][0], signal.SIGKILL)
    until("has gone: it ended without a word")
    until("newest complete checkpoint: ")
    until("runner: going on with 1 of 2 nodes: node 1 didn't come to 127.0.0.1")
    until(" lm loss: ")
    first.send_signal(signal.SIGINT)
    assert first.wait(600) == 0, said
    for run in launchers.ps():
        launchers("stop", run)
