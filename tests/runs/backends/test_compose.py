"""The compose file of a plan; no engine is needed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.base.errors import UsageError
from launcher.images.matrix import dockerfile
from launcher.images.matrix.matrix_file import load_matrix
from launcher.runs.backends.compose import compose_request
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from launcher.runs.runfile.values import Gpus, parse_gpus, split
from launcher.tools import compose_examples

from .test_docker import SECRET, kept, with_secrets

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def single(full: Plan) -> Plan:
    """One node with something in every field."""
    return replace(full, tie=False)


@pytest.fixture
def several(full: Plan) -> Plan:
    """Two nodes with something in every field."""
    meeting = {"PET_NNODES": "2", "PET_NODE_RANK": "0"}
    meeting |= {"PET_MASTER_ADDR": "node-0", "PET_MASTER_PORT": "29500"}
    board = Mount("/tmp/board", "/tensorboard", False, "logging")  # noqa: S108
    return replace(
        full,
        tie=False,
        nodes=2,
        network=None,
        gpus=Gpus(1, ("0", "1")),
        env=tuple(sorted((dict(full.env) | meeting).items())),
        labels=(*full.labels, ("megatron-launchpad.node", "0")),
        mounts=(*full.mounts, board),
    )


@pytest.mark.parametrize("name", ["single", "several"])
def test_the_file_is_as_kept(name: str, request: pytest.FixtureRequest) -> None:
    kept(f"compose-{name}.txt", compose_request.show(request.getfixturevalue(name)))


def services(plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(compose_request.request(plan).text)["services"]
    return found


@pytest.mark.parametrize(
    ("asked", "nodes", "each"),
    [
        ("0", 2, [(), ()]),
        ("2", 2, [("0", "1"), ("2", "3")]),
        ("1", 3, [("0",), ("1",), ("2",)]),
        ("device=3,1,7,5", 2, [("3", "1"), ("7", "5")]),
        ("device=GPU-a,GPU-b", 2, [("GPU-a",), ("GPU-b",)]),
        ("all", 2, [("0", "1"), ("2", "3")]),
    ],
)
def test_gpus_are_shared_out_in_order(asked: str, nodes: int, each: list[tuple[str, ...]]) -> None:
    gpus = parse_gpus(asked)
    gpus = split(replace(gpus, count=4) if gpus.everything else gpus, nodes)
    found = [gpus.of_node(rank) for rank in range(nodes)]
    assert [one.devices for one in found] == each
    assert {one.count for one in found} == {len(each[0])}


@pytest.mark.parametrize("asked", ["device=0,1,2", "all"])
def test_what_cant_be_shared_out_is_refused(asked: str) -> None:
    with pytest.raises(UsageError, match="3 GPUs, which 2 nodes can't share evenly"):
        split(replace(parse_gpus(asked), count=3), 2)


def test_what_compose_cant_do_is_refused(full: Plan, several: Plan) -> None:
    with pytest.raises(UsageError, match="--tie"):
        compose_request.request(full)
    with pytest.raises(UsageError, match=r"resources\.network"):
        compose_request.request(replace(several, network="host"))


def test_no_network_is_one_that_leads_nowhere_for_several_nodes(several: Plan) -> None:
    """`run gpt2-tiny.yaml --backend compose --nodes 2` was refused for the preset's own key."""
    file = compose_request.request(replace(several, network="none")).file
    assert file["networks"] == {"nodes": {"driver": "bridge", "internal": True}}
    nodes = [one for name, one in file["services"].items() if name.startswith("node-")]
    assert [node["networks"] for node in nodes] == [["nodes"], ["nodes"]]


def test_secrets_are_in_the_environment_and_not_in_the_file(bare: Plan) -> None:
    plan = with_secrets(bare)
    wanted = compose_request.request(plan)
    assert SECRET not in compose_request.show(plan)
    assert wanted.secrets == {"API_KEY": SECRET, "SECRET_4": SECRET, "SECRET_5": SECRET}
    service = services(plan)["node-0"]
    assert service["environment"] == {"API_KEY": None, "DEBUG": "1"}
    assert [filled(word, wanted.secrets) for word in service["command"]] == [*plan.argv]
    asked = [line for line in compose_request.show(plan).splitlines() if line.startswith(": ")]
    assert [line.partition("{")[2].partition(":")[0] for line in asked] == [*wanted.secrets]


def filled(word: str, secrets: dict[str, str]) -> str:
    """A word as compose reads it."""
    for name, value in secrets.items():
        word = word.replace(f"${{{name}?export it first}}", value)
    return word.replace("$$", "$")


@pytest.mark.parametrize("text", ["1e-05", "24.10", "-1", "+2", ".5", "0x1F", "1:30", "2025-01-02"])
def test_what_looks_like_a_number_is_quoted(bare: Plan, text: str) -> None:
    """YAML 1.2, which compose reads, has other numbers than 1.1, which PyYAML reads."""
    assert f"'{text}'" in compose_request.request(replace(bare, argv=("x", text))).text


def test_what_is_shown_is_what_runs(several: Plan) -> None:
    before, _, rest = compose_request.show(several).partition(" <<'EOF'\n")
    assert rest == f"{compose_request.request(several).text}EOF\n"
    made, command = (shlex.split(line) for line in before.splitlines())
    assert made == ["mkdir", "-p", "--", "/var/tmp", "/tmp/board"]  # noqa: S108
    assert tuple(command[-2:]) == compose_request.UP


def test_examples_are_what_is_rendered() -> None:
    found = compose_examples.files(load_matrix(), ROOT)
    assert {
        path for path in found if dockerfile.drift({path: found[path]}, ROOT) == [path]
    } == set()
    assert {path.name for path in (ROOT / "compose").glob("*.yaml")} == {p.name for p in found}


def test_examples_name_no_place_of_a_machine() -> None:
    for path in (ROOT / "compose").glob("*.yaml"):
        for service in yaml.safe_load(path.read_text())["services"].values():
            sources = {one["source"] for one in service["volumes"]} - {"../launcher"}
            assert all(one.startswith("./") for one in sources)
            assert "labels" not in service


def test_a_project_has_a_name_that_compose_takes(bare: Plan) -> None:
    assert compose_request.project_name(replace(bare, name="My.Run_1-")) == "my-run_1--0a1b2c3d"
