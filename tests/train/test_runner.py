"""The runner: what it refuses, what ranks are given, how their ends come out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.train import runner

from .conftest import environment, runner_command, start


def job(*argv: str, environ: dict[str, str] | None = None) -> runner.Job:
    return runner.parse(["--processes-per-node", "2", *argv], environ or {})


def test_program_is_all_that_follows_the_dashes() -> None:
    parsed = job("--", "-m", "package.module", "--cpu", "--", "x")
    assert parsed.program == ("-m", "package.module", "--cpu", "--", "x")
    assert not parsed.cpu


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "no program"),
        (["--", "-m"], "no program"),
        (["--nodes", "2", "--node-rank", "2", "--", "x"], "not in 0..1"),
        (["--nodes", "2", "--", "x"], "--master-addr"),
    ],
)
def test_refusals(argv: list[str], reason: str) -> None:
    with pytest.raises(runner.Refused, match=reason):
        job(*argv)


def test_one_node_meets_on_loopback() -> None:
    parsed = job("--", "x")
    assert parsed.master_addr == "127.0.0.1"
    assert parsed.master_port > 0


def test_a_clusters_variables_are_defaults() -> None:
    cluster = {"MASTER_ADDR": "node-a", "MASTER_PORT": "1234", "NNODES": "3", "NODE_RANK": "2"}
    parsed = job("--master-port", "99", "--", "x", environ=cluster)
    assert (parsed.nodes, parsed.node_rank) == (3, 2)
    assert (parsed.master_addr, parsed.master_port) == ("node-a", 99)


@pytest.mark.parametrize(
    ("visible", "cpu", "reason"),
    [(2, False, ""), (0, True, ""), (4, True, ""), (0, False, "--cpu"), (1, False, "1 visible")],
)
def test_one_device_per_process(visible: int, cpu: bool, reason: str) -> None:
    parsed = job(*(["--cpu"] if cpu else []), "--", "x")
    if not reason:
        runner.check_devices(parsed, visible)
        return
    with pytest.raises(runner.Refused, match=reason):
        runner.check_devices(parsed, visible)


def test_environment_of_a_rank_on_the_second_node() -> None:
    where = ["--nodes", "2", "--node-rank", "1", "--master-addr", "a", "--master-port", "1"]
    given = runner.environment(job(*where, "--", "x"), 1, {"OMP_NUM_THREADS": "7"}, cpus=8)
    assert given == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
        "OMP_NUM_THREADS": "7",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }


def test_cpu_ranks_on_one_node_use_loopback() -> None:
    given = runner.environment(job("--cpu", "--", "x"), 0, {}, cpus=4)
    assert given["GLOO_SOCKET_IFNAME"] == "lo"
    assert given["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_code_is_the_shells(code: int, expected: int) -> None:
    assert runner.exit_code(code) == expected


SLEEPER = """
import os, signal, sys, time
rank = os.environ["RANK"]
if rank == "1":
    {rank_1}
for signum in (signal.SIGTERM, signal.SIGINT):
    signal.signal(signum, {handler})
print("ready", rank, flush=True)
time.sleep(60)
"""


def sleeper(folder: Path, rank_1: str = "pass", handler: str = "signal.SIG_DFL") -> str:
    script = folder / "sleeper.py"
    script.write_text(SLEEPER.format(rank_1=rank_1, handler=handler))
    return str(script)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("rank_1", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with code 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by signal 9 (SIGKILL)"),
    ],
)
def test_first_failure_is_named_and_passed_on(
    tmp_path: Path, rank_1: str, code: int, words: str
) -> None:
    began = time.monotonic()
    run = start(2, sleeper(tmp_path, rank_1))
    assert run.code == code
    assert run.output.count("runner:") == 1
    assert words in run.output
    assert time.monotonic() - began < 30


@pytest.mark.megatron
def test_ranks_that_outlive_a_failed_one_are_killed(tmp_path: Path) -> None:
    script = sleeper(tmp_path, "time.sleep(1); sys.exit(3)", handler="signal.SIG_IGN")
    began = time.monotonic()
    run = start(2, script)
    assert run.code == 3
    assert "killing rank 0: outlived a failed rank" in run.output
    assert time.monotonic() - began < 30


def signalled(script: str, *signums: int, grace: str = "60") -> tuple[int, str]:
    """Start two ranks, wait until both are ready, send the runner signals half a second apart."""
    command = runner_command(2, script)
    command[command.index("--") : command.index("--")] = ["--grace", grace]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout
        output = process.stdout.readline() + process.stdout.readline()
        for signum in signums:
            process.send_signal(signum)
            time.sleep(0.5)
        output += process.stdout.read()
    return process.returncode, output


@pytest.mark.megatron
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_may_end_well_after_a_signal(tmp_path: Path, signum: int) -> None:
    handler = "lambda *_: (time.sleep(1), print('saved', rank, flush=True), sys.exit(0))"
    code, output = signalled(sleeper(tmp_path, handler=handler), signum)
    assert code == 0, output
    assert "saved 0" in output
    assert "saved 1" in output


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("signals", "grace", "why"),
    [
        ([signal.SIGTERM, signal.SIGTERM], "60", "stopped a second time"),
        ([signal.SIGTERM], "1", "grace period over"),
    ],
)
def test_ranks_that_ignore_a_signal_are_killed(
    tmp_path: Path, signals: list[int], grace: str, why: str
) -> None:
    code, output = signalled(sleeper(tmp_path, handler="signal.SIG_IGN"), *signals, grace=grace)
    assert code == 137, output
    assert why in output


@pytest.mark.megatron
def test_refusal_starts_nothing(tmp_path: Path) -> None:
    command = [part for part in runner_command(2, sleeper(tmp_path)) if part != "--cpu"]
    hidden = {**environment(), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("runner: no CUDA device is visible: give --cpu")
    assert done.stdout == ""


@pytest.mark.megatron
def test_old_torch_is_started_with_its_own_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic import multiprocessing

    seen = {}

    class Context:
        subprocess_handlers: dict[int, object] = {}  # noqa: RUF012

    def old(name: str, entrypoint: str, args: dict, envs: dict, log_dir: str) -> Context:  # type: ignore[type-arg]
        seen.update(entrypoint=entrypoint, args=args, log_dir=log_dir)
        return Context()

    monkeypatch.setattr(multiprocessing, "start_processes", old)
    runner._start(job("--", "train.py", "x"), dict(os.environ), str(tmp_path))
    assert seen["entrypoint"] == sys.executable
    assert seen["args"][1] == ("-u", "train.py", "x")
    assert seen["log_dir"] == str(tmp_path)
