"""What is asked of the engine, and the command that asks for the same; no engine is needed."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.runs.backends import shown
from launcher.runs.backends.docker import docker, docker_request
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.secrets import is_secret
from launcher.runs.runfile.values import parse_gpus
from tests.e2e.site import program
from tests.plans import HOST as MACHINE
from tests.plans import Planner
from tests.tables import table

GOLDEN = Path(__file__).parent / "golden"
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"[a-z_]\w{0,8}", fullmatch=True).filter(
    lambda name: name.isascii() and not is_secret(name)
)


def kept(name: str, text: str) -> None:
    """Compare with the text that is kept under `name`."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", ["bare", "full"])
def test_the_request_is_as_kept(name: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(name)
    wanted = docker_request.request(plan)
    kept(f"{name}.json", json.dumps({"name": wanted.name, **wanted.body}, indent=1) + "\n")
    kept(f"{name}.txt", docker_request.show(plan))


@table("gpus", "count", "ids", "word")
def test_gpus(bare: Plan, gpus: str, count: int, ids: list[str] | None, word: str) -> None:
    """Several devices have quotes within the shell's, as the docker command reads CSV."""
    asked = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    plan = replace(bare, gpus=replace(parse_gpus(gpus), count=2))
    requests = docker_request.request(plan).body["HostConfig"]["DeviceRequests"]
    assert requests == [asked | {"Count": count, "DeviceIDs": ids}]
    argv = docker_request.command(plan)
    assert argv[argv.index("--gpus") + 1] == word
    assert next(csv.reader([word])) == [gpus]


@pytest.mark.parametrize(
    ("size", "number"),
    [("512", 512), ("512b", 512), ("2k", 2048), ("1M", 1 << 20), ("3g", 3 << 30)],
)
def test_sizes(bare: Plan, size: str, number: int) -> None:
    host = docker_request.request(replace(bare, shm_size=size)).body["HostConfig"]
    assert host["ShmSize"] == number


SECRET = "s3cr3t"  # noqa: S105


def with_secrets(plan: Plan) -> Plan:
    argv = ("python3", "-m", "x", "--wandb-api-key", SECRET, f"--hf-token={SECRET}", "--seed", "7")
    return replace(plan, argv=argv, env=(("API_KEY", SECRET), ("DEBUG", "1")))


STAND_IN = """\
#!/bin/sh
# Stands in for docker: writes down its arguments.
for word; do printf '%s\\0' "$word"; done > "$TOLD"
"""


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with a docker that only writes down what it is told."""
    folder = tmp_path_factory.mktemp("bin")
    program(folder / "docker", STAND_IN)
    return folder


def test_a_line_without_its_secrets_runs_once_they_are_exported(
    bare: Plan, bin_folder: Path
) -> None:
    """ "(hidden)" in the line was given to the program as the key."""
    plan, told = with_secrets(bare), bin_folder / "told"
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "TOLD": str(told)}
    line = ["sh", "-e", "-c", docker_request.show(plan)]
    assert subprocess.run(line, env=env, capture_output=True).returncode == 2
    assert not told.exists()
    subprocess.run(line, env=env | shown.secrets(plan), check=True)
    words = told.read_bytes().decode().split("\0")[:-1]
    assert words[-len(plan.argv) :] == [*plan.argv]
    assert words[words.index("--env") + 1] == "API_KEY"
    assert f"API_KEY={SECRET}" in docker_request.request(plan).body["Env"]
    assert SECRET in docker_request.request(plan).body["Cmd"]
    told.unlink()


HOSTILE = st.sampled_from(
    ["$(touch pwned)", "`touch pwned`", "; touch pwned", "'; touch pwned #", "\n touch pwned", "*"]
)


@given(st.lists(HOSTILE | WORDS, min_size=1, max_size=4), HOSTILE | WORDS, HOSTILE)
@settings(max_examples=30, deadline=None)
def test_a_shell_takes_no_value_for_a_command(
    bin_folder: Path, argv: list[str], value: str, path: str
) -> None:
    from .conftest import BARE

    mounts = (Mount(f"/{path}".replace("\n", ""), "/data", True, "data.path"),)
    plan = replace(BARE, argv=tuple(argv), env=(("A", value),), mounts=mounts, workdir=value or "/")
    told = bin_folder / "told"
    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "TOLD": str(told)}
    text = docker_request.show(plan)
    subprocess.run(["sh", "-e"], input=text.encode(), env=env, cwd=bin_folder, check=True)
    words = told.read_bytes().decode().split("\0")[:-1]
    assert ["docker", *words] == docker_request.command(plan)
    assert sorted(path.name for path in bin_folder.iterdir()) == ["docker", "told"]


def test_infinibands_devices_go_into_a_node_of_several(plan: Planner) -> None:
    """NCCL went by TCP in the container, and said so to nobody; one node has no use for them."""
    several = ["nodes.count=2", "nodes.master_addr=a", "gpus=1"]
    there = replace(MACHINE, infiniband=True)
    for sets, host, devices in (
        (several, there, ("/dev/infiniband",)),
        (several, MACHINE, ()),
        (["gpus=1"], there, ()),
        ([*several, "resources.devices=[]"], there, ()),
        ([*several, "resources.devices=[/dev/fuse]"], there, ("/dev/fuse",)),
    ):
        assert plan("gpt2.yaml", *sets, host=host).devices == devices, sets
    scheduled = replace(MACHINE, scheduled=True)
    assert plan("gpt2.yaml", "nodes=2", host=scheduled).own_devices
    assert not plan("gpt2.yaml", "nodes=2", "resources.devices=[]", host=scheduled).own_devices


def test_a_variable_without_value_is_passed_on_by_its_name(bare: Plan) -> None:
    argv = docker_request.command(replace(bare, env=(("NOT_SET", None),)))
    assert argv[argv.index("--env") + 1] == "NOT_SET"


def test_a_run_file_may_allow_new_privileges(plan: Planner) -> None:
    """Without it the request and the line say no-new-privileges, as is kept of "bare"."""
    allowed = plan("gpt2.yaml", "resources.no_new_privileges=false")
    assert "SecurityOpt" not in docker_request.request(allowed).body["HostConfig"]
    assert "--security-opt" not in docker_request.command(allowed)


@table("info", "rootless")
def test_a_rootless_engine_says_so(info: dict[str, object], rootless: bool) -> None:
    class Api:
        def info(self) -> dict[str, object]:
            return info

    class Client:
        api = Api()

    assert docker.DockerBackend(Client).rootless() is rootless  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_shell_is_the_same_container_that_goes_when_it_is_left(
    full: Plan, terminal: bool
) -> None:
    argv = docker_request.shell_command(full, terminal=terminal)
    assert ("--tty" in argv) is terminal
    assert "--rm" in argv
    assert [word for word in argv if word != "--tty"] == docker_request.command(full)
    assert docker_request.shell_command(replace(full, argv=()), terminal=terminal)[-1] == "bash"


def test_a_dry_run_of_docker_needs_no_docker() -> None:
    code = (
        "import sys; from launcher.runs.backends import backend; backend('docker');"
        "print(sorted({'docker', 'requests'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
