"""The doctor's exit codes and forms, on this machine with made-up GPUs."""

from __future__ import annotations

import argparse
import json
from typing import Any

import pytest

from launcher.agent.ranks.command_line import free_port
from launcher.base.errors import EngineError, UsageError
from launcher.cli import doctor
from launcher.runs import backends, payload
from launcher.runs.backends import local
from launcher.runs.checks import gather
from launcher.runs.checks.machine import Gpu
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.runfile.origins import NODE_RANKS

OLD = Gpu(0, "GPU-0", "NVIDIA GeForce RTX 3090", 24 << 30, 0, (8, 6), "470.57.02")


def run(*argv: str) -> int:
    return doctor.doctor(doctor.doctor.declare(argparse.ArgumentParser()).parse_args(argv))


@pytest.fixture(autouse=True)
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.LocalBackend, "facts", lambda self, image: ImageFacts("0.16.1"))


@pytest.fixture(autouse=True)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's: none, but for what a test names."""
    monkeypatch.setattr(gather, "nvidia_gpus", lambda: getattr(request, "param", None))
    monkeypatch.setattr(gather, "nvidia_uses", lambda: ())


@pytest.mark.parametrize(
    ("gpus", "asked", "code", "said"),
    [
        (None, "", 0, "no GPU: CPU runs only"),
        (None, "--gpus 2", 121, "refused  GPUs"),  # they must be there
        ((OLD,), "--tag 24.10", 121, "refused  driver"),
        ((OLD,), "", 0, "RTX 3090"),
        ((OLD,), "--tag 24.10 --gpus 0", 0, ""),
    ],
    indirect=["gpus"],
)
def test_what_is_there_is_held_against_what_is_asked_for(
    capsys: pytest.CaptureFixture[str], asked: str, code: int, said: str
) -> None:
    assert run("--backend", "local", *asked.split()) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("facts", "code", "said"),
    [
        (ImageFacts("0.9.0"), 0, "ok       python3   torch, and Megatron-Core 0.9.0"),
        (ImageFacts(), 0, "warning  python3   torch, but no Megatron-Core"),
        (EngineError("python3 here has no torch"), 121, "refused  python3   python3 here has no"),
    ],
)
def test_without_a_container_this_environment_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    facts: ImageFacts | EngineError,
    code: int,
    said: str,
) -> None:
    def known(self: object, image: str) -> ImageFacts:
        if isinstance(facts, EngineError):
            raise facts
        return facts

    monkeypatch.setattr(local.LocalBackend, "facts", known)
    assert run("--backend", "local") == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("gpus", [(OLD,)], indirect=True)
def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--backend", "local", "--tag", "24.10", "--json") == 121
    found = {line["name"]: line for line in json.loads(capsys.readouterr().out)}
    assert found["driver"]["state"] == "refused"
    assert found["GPU 0"]["found"].startswith("NVIDIA GeForce RTX 3090, 25.8 GB")


def test_no_engine_is_a_line_among_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Lost:
        contained = has_engine = True

        @property
        def engine(self) -> Any:
            raise EngineError("no engine answers", "Start one.")

    monkeypatch.setattr(backends, "backend", lambda name: Lost())
    assert run() == 121
    out = capsys.readouterr().out
    assert out.startswith("refused  engine")
    assert "→ Start one." in out
    assert "cache" in out


def test_a_node_has_to_know_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slurm says so; nobody does to who types the line."""
    for name in NODE_RANKS:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UsageError, match="--nodes 2 --node-rank -1"):
        run("--nodes", "2", "--master-addr", "127.0.0.1")
    with pytest.raises(UsageError, match="needs --master-addr"):
        run("--nodes", "2", "--node-rank", "1")
    monkeypatch.setenv("SLURM_NODEID", "1")
    port = str(free_port())
    argv = ("--nodes", "2", "--master-addr", "127.0.0.1", "--master-port", port, "--wait", "0.1")
    assert run(*argv, "--json") == 121
    (line,) = json.loads(capsys.readouterr().out)
    assert line["found"].startswith(f"127.0.0.1:{port}: nobody listens there")


def test_the_all_reduce_is_this_checkouts() -> None:
    parser = doctor.doctor.declare(argparse.ArgumentParser())
    args = parser.parse_args(["--nccl", "--gpus", "device=0,1", "--backend", "local"])
    plan = doctor.all_reduce_plan(args, local.backend())
    assert plan.argv[-3:] == ("--", "-m", "launcher.agent.allreduce")
    assert dict(plan.labels)["megatron-launchpad.payload"] == payload.digest()
    assert plan.processes_per_node == 2
    assert plan.gpus.devices == ("0", "1")


@pytest.mark.long
@pytest.mark.engine
def test_an_all_reduce_in_the_image(cpu_images: Any, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("--nccl", "--gpus", "0", "--image", cpu_images.build(), "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert [one["megabytes"] for one in found["sizes"]] == [1, 1, 4, 4, 16, 16, 64, 64, 256, 256]
