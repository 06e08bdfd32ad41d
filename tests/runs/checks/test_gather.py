"""What is looked up: files and folders of a real disk, an engine's answers made up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.runs.checks import gather
from launcher.runs.checks.gather import RunUser
from launcher.runs.checks.machine import Gpu, Machine, SavedCheckpoints, Use
from launcher.runs.datasets import indexed
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.mounts import Host
from launcher.runs.plan.plan import Stamp
from tests.plans import load, plan_of

HERE = socket.gethostname()


class Api:
    """A stand-in for the SDK's client of an engine."""

    base_url = "http+docker://localhost"

    def __init__(self, info: dict[str, Any], path: str = "/nowhere.sock") -> None:
        self.told = {"Name": HERE, "ServerVersion": "27.0"} | info
        self.host = f"unix://{path}"

    def info(self) -> dict[str, Any]:
        return self.told


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing of NVIDIA's anywhere: a folder that is PATH, and no CDI files."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(gather, "CDI_FOLDERS", (str(tmp_path / "cdi"),))
    monkeypatch.setattr(gather, "SYSTEM", str(folder))
    return folder


@pytest.fixture
def look(tmp_path: Path) -> Callable[..., Machine]:
    """The machine for a run on the CPU, as the given user."""

    def look(*sets: str, user: str = "auto", api: Any = None) -> Machine:
        sets = (*sets, f"resources.user='{user}'")
        config, origin = load("gpt2-tiny", *sets)
        host = Host(os.getuid(), os.getgid(), str(tmp_path), str(tmp_path), str(tmp_path / "cache"))
        plan = plan_of(config, origin, ImageFacts(), host, Stamp("a", ""))
        return gather.gather(config, plan, api)

    return look


@pytest.mark.parametrize(
    ("info", "gives"),
    [
        ({}, False),
        ({"Runtimes": {"runc": {}}}, False),
        ({"Runtimes": {"nvidia": {}}}, True),
        ({"DiscoveredDevices": [{"ID": "nvidia.com/gpu=0"}]}, True),
        ({"DiscoveredDevices": [{"ID": "other.com/x=0"}]}, False),
        ({"Name": "docker-desktop"}, None),
    ],
)
def test_whether_an_engine_gives_gpus(bare: Path, info: dict[str, Any], gives: bool | None) -> None:
    assert gather.engine(Api(info)).gpus is gives


def test_the_toolkit_here_will_do(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "specs").mkdir()
    (tmp_path / "specs/nvidia.yaml").write_text("")
    assert gather.engine(Api({"CDISpecDirs": [str(tmp_path / "specs")]})).gpus is True
    hook = bare / "nvidia-container-runtime-hook"
    hook.write_text("")
    hook.chmod(0o755)
    assert gather.engine(Api({})).gpus is True


def test_the_engines_own_path_counts(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who listens is this process, whose environment is as it was at its start."""
    place = tmp_path / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        told = Path(f"/proc/{os.getpid()}/environ").read_bytes().split(b"\0")
        own = next(one[5:].decode() for one in told if one.startswith(b"PATH="))
        assert gather._path_of(str(place)) == own
    assert gather._path_of(str(tmp_path / "nobody")) == ""


def test_of_an_engine_elsewhere_only_what_it_tells(bare: Path) -> None:
    found = gather.machine(Api({"Name": "elsewhere"}))
    assert found.engine
    assert not found.engine.local
    assert found == Machine(engine=found.engine)


def test_this_machine(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "nvidia_gpus", lambda: ())
    found = gather.machine(Api({"SecurityOptions": ["name=rootless"]}))
    assert found.engine
    assert found.engine.rootless
    assert found.gpus == ()
    assert found.shm is not None
    assert found.memlock is not None
    assert gather.machine(Api({})).memlock is None


def test_data_is_looked_into(look: Callable[..., Machine], tmp_path: Path) -> None:
    indexed.write(tmp_path / "good", [[1, 256, 3]], 256)
    indexed.write(tmp_path / "bad", [[1, 2, 3]], 256)
    os.truncate(tmp_path / "bad.bin", 5)
    good, bad = look(f"data.path=[1, {tmp_path}/good, 1, {tmp_path}/bad]").datasets
    assert (good.problem, good.tokens, good.greatest) == ("", 3, 256)
    assert bad.problem == f"{tmp_path}/bad.bin: 5 bytes, and its index ends at 6"


def test_data_that_isnt_there_is_told_elsewhere(
    look: Callable[..., Machine], tmp_path: Path
) -> None:
    (found,) = look(f"data.path={tmp_path}/none").datasets
    assert found.problem == ""
    (tmp_path / "none.idx").mkdir()
    (tmp_path / "none.bin").write_bytes(b"12")
    (found,) = look(f"data.path={tmp_path}/none").datasets
    assert found.problem == f"{tmp_path}/none.idx: Is a directory"


def test_the_runs_user_has_to_read_the_data(look: Callable[..., Machine], tmp_path: Path) -> None:
    indexed.write(tmp_path / "d", [[1]], 256)
    (tmp_path / "d.bin").chmod(0o600)
    (found,) = look(f"data.path={tmp_path}/d", user="12345:12345", api=Api({})).datasets
    assert found.problem == f"{tmp_path}/d.bin: user 12345:12345 may not read it"
    (tmp_path / "d.bin").chmod(0o644)
    (found,) = look(f"data.path={tmp_path}/d", user="12345:12345", api=Api({})).datasets
    assert found.problem == ""


def test_the_runs_user_has_to_write_to_the_folder(
    look: Callable[..., Machine], tmp_path: Path
) -> None:
    (tmp_path / "c").mkdir(mode=0o755)
    sets = ("checkpoint.save=c", "checkpoint.load=c")
    (found,) = look(*sets, user="12345:12345", api=Api({})).folders
    assert found.problem.startswith("user 12345:12345 may not write to it, which is ")
    assert found.free
    rootless = Api({"SecurityOptions": ["name=rootless"]})
    (found,) = look(*sets, user="12345:12345", api=rootless).folders
    assert found.problem == ""
    (tmp_path / "c").chmod(0o777)
    (found,) = look(*sets, user="12345:12345", api=Api({})).folders
    assert found.problem == ""
    (found,) = look("checkpoint.save=a/b/c", api=Api({})).folders
    assert (found.problem, bool(found.free)) == ("", True)  # it is made later


@pytest.mark.parametrize(
    ("mode", "who", "may"),
    [
        (0o400, RunUser(7, (7,)), True),
        (0o040, RunUser(7, (7,)), False),  # the owner's bits are the owner's
        (0o040, RunUser(8, (9,)), True),
        (0o004, RunUser(8, (9,)), False),
        (0o004, RunUser(8, (10,)), True),
        (0o000, RunUser(0, (0,)), True),
        (0o000, None, True),
    ],
)
def test_who_may_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, who: RunUser | None, may: bool
) -> None:
    told = os.stat_result((mode, 0, 0, 1, 7, 9, 0, 0, 0, 0))
    monkeypatch.setattr(os, "stat", lambda path: told)
    monkeypatch.setattr(os, "listxattr", lambda path: [])
    assert gather.may("x", who, os.R_OK) is may
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
    assert gather.may("x", RunUser(8, (10,)), os.W_OK)  # such a list isn't guessed at


def test_checkpoints_are_looked_at(look: Callable[..., Machine], tmp_path: Path) -> None:
    (tmp_path / "c/iter_0000020").mkdir(parents=True)
    found = look("checkpoint.save=c", "checkpoint.load=c")
    assert found.load == found.save
    assert found.load
    assert found.load.newest is None
    assert found.load.broken[0][0] == str(tmp_path / "c/iter_0000020")
    assert look("checkpoint.save=none").save is None
    (tmp_path / "empty").mkdir()
    assert look("checkpoint.save=empty").save == SavedCheckpoints(None)


def test_a_taken_port_and_a_strange_name(look: Callable[..., Machine]) -> None:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        nodes = f"nodes={{count: 2, master_addr: localhost, master_port: {port}}}"
        assert look(nodes).port is False
    assert look(nodes).port is True
    assert look(f"{nodes[:-1]}, rank: 1}}").resolves is True
    strange = nodes.replace("localhost", "no.such.host.invalid")
    assert look(f"{strange[:-1]}, rank: 1}}").resolves is False
    assert look().port is None


ENGINE = """\
# Stands in for an engine with mounts of its own: it listens, and does nothing else.
import socket, subprocess, sys
place, hidden = sys.argv[1:]
subprocess.run(["mount", "-t", "tmpfs", "tmpfs", hidden], check=True)
listener = socket.socket(socket.AF_UNIX)
listener.bind(place)
listener.listen()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a process mounts of its own")
def test_a_folder_that_the_engine_does_not_see_is_found(
    look: Callable[..., Machine], tmp_path: Path
) -> None:
    """A run wrote into the empty folder below such a mount, and ended with 0."""
    place = tmp_path / "engine.sock"
    for name in ("hidden", "seen", "link"):
        (tmp_path / name).mkdir()
    (tmp_path / "link/to").symlink_to(tmp_path / "hidden")
    argv = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", ENGINE]
    with subprocess.Popen(
        [*argv, str(place), str(tmp_path / "hidden")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as engine:
        assert engine.stdin
        assert engine.stdout
        assert engine.stdout.readline() == b"ready\n"
        api = Api({}, str(place))
        for folder, unseen in {
            "hidden": True,
            "hidden/new/below": True,
            "link/to": True,
            "seen": False,
            "new": False,
        }.items():
            path = str(tmp_path / folder)
            found = look(f"checkpoint.save={path}", api=api).unseen
            assert found == ((("checkpoint.save", path),) if unseen else ())
        engine.stdin.close()
    assert look(f"checkpoint.save={tmp_path}/hidden").unseen == ()


def test_an_engine_without_mounts_of_its_own_sees_what_we_see(tmp_path: Path) -> None:
    place = str(tmp_path / "engine.sock")
    assert gather._root(place) is None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(place)
        listener.listen()
        assert gather._root(place) is None


# What nvidia-smi prints, with a stand-in for it on PATH

MIB = 1 << 20
GPUS = """\
0, GPU-1a2b, NVIDIA H100 80GB HBM3, 81559, 1024, 9.0, 550.54.15
1, GPU-3c4d, "Odd, with a comma", 16384, 0, [N/A], 550.54.15
half a row
"""
USES = "GPU-1a2b, 4242, 1000\nGPU-1a2b, 4243, [N/A]\n"


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an nvidia-smi on PATH that runs a shell script."""

    def put(script: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return put


def test_a_machine_without_a_driver_has_no_gpu(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--backend local --gpus 2` was refused by the runner alone, once a record had been made."""
    monkeypatch.setattr(gather, "DRIVERS", (str(tmp_path / "device"),))
    assert gather.machine(None).gpus == ()
    assert gather.machine(None, gpus=False).gpus is None
    (tmp_path / "device").touch()  # a driver that can't be asked
    assert gather.machine(None).gpus is None


def test_gpus_and_their_users(stand_in, tmp_path: Path) -> None:
    (tmp_path / "gpus").write_text(GPUS)
    (tmp_path / "uses").write_text(USES)
    stand_in(f'case "$1" in *query-gpu*) cat {tmp_path}/gpus;; *) cat {tmp_path}/uses;; esac')
    assert gather.nvidia_gpus() == (
        Gpu(0, "GPU-1a2b", "NVIDIA H100 80GB HBM3", 81559 * MIB, 1024 * MIB, (9, 0), "550.54.15"),
        Gpu(1, "GPU-3c4d", "Odd, with a comma", 16384 * MIB, 0, None, "550.54.15"),
    )
    assert gather.nvidia_uses() == (Use("GPU-1a2b", 4242, 1000 * MIB), Use("GPU-1a2b", 4243, None))


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("echo No devices were found; exit 6", ()),
        ("echo 'NVIDIA-SMI has failed' ; exit 9", None),
        (  # an older driver doesn't know the capability
            'case "$1" in *compute_cap*) exit 2;; *) echo "0, GPU-1, Tesla T4, 15109, 0, 450.80";; '
            "esac",
            (Gpu(0, "GPU-1", "Tesla T4", 15109 * MIB, 0, None, "450.80"),),
        ),
    ],
)
def test_other_drivers(stand_in, script: str, gpus: tuple[Gpu, ...] | None) -> None:
    stand_in(script)
    assert gather.nvidia_gpus() == gpus
    assert gather.nvidia_uses() == ()


def test_no_driver_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gather.nvidia_gpus() is None
