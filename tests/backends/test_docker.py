"""What is asked of the engine, and the command that asks for the same; no engine is needed."""

from __future__ import annotations

import csv
import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.backends import docker
from launcher.run.gpus import Gpus, parse_gpus
from launcher.run.plan import Mount, Plan

GOLDEN = Path(__file__).parent / "golden"
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=12)
NAMES = st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True).filter(str.isascii)
PATHS = st.text(
    st.characters(exclude_characters="\0\r\n", exclude_categories=["Cs"]), min_size=1, max_size=12
).map("/".__add__)


def kept(name: str, text: str) -> None:
    """Compare with the text that is kept under `name`."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"


@pytest.mark.parametrize("name", ["bare", "full"])
def test_the_request_is_as_kept(name: str, request: pytest.FixtureRequest) -> None:
    plan: Plan = request.getfixturevalue(name)
    wanted = docker.request(plan)
    kept(f"{name}.json", json.dumps({"name": wanted.name, **wanted.body}, indent=1) + "\n")
    kept(f"{name}.txt", docker.show(plan))


def devices(plan: Plan, gpus: str) -> object:
    asked = parse_gpus(gpus)
    asked = replace(asked, count=4) if asked.everything else asked
    host = docker.request(replace(plan, gpus=asked)).body["HostConfig"]
    return host.get("DeviceRequests")


@pytest.mark.parametrize(
    ("gpus", "count", "ids"),
    [("2", 2, None), ("all", -1, None), ("device=0,1", 0, ["0", "1"]), ("device=3", 0, ["3"])],
)
def test_gpus(bare: Plan, gpus: str, count: int, ids: list[str] | None) -> None:
    asked = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    assert devices(bare, gpus) == [asked | {"Count": count, "DeviceIDs": ids}]


def test_without_gpus_none_are_asked_for(bare: Plan) -> None:
    assert devices(bare, "0") is None
    assert "--gpus" not in docker.command(bare)


@pytest.mark.parametrize(
    ("gpus", "word"),
    [("2", "2"), ("all", "all"), ("device=0,1", '"device=0,1"'), ("device=3", "device=3")],
)
def test_several_devices_have_inner_quotes(bare: Plan, gpus: str, word: str) -> None:
    argv = docker.command(replace(bare, gpus=replace(parse_gpus(gpus), count=2)))
    assert argv[argv.index("--gpus") + 1] == word
    assert next(csv.reader([word])) == [gpus]  # as the docker command reads it


@pytest.mark.parametrize(
    ("size", "number"),
    [("512", 512), ("512b", 512), ("2k", 2048), ("1M", 1 << 20), ("3g", 3 << 30)],
)
def test_sizes(bare: Plan, size: str, number: int) -> None:
    host = docker.request(replace(bare, shm_size=size)).body["HostConfig"]
    assert host["ShmSize"] == number


@given(st.lists(WORDS, min_size=1), st.dictionaries(NAMES, WORDS), PATHS, PATHS)
def test_the_shown_line_reads_back_as_the_same_words(
    argv: list[str], env: dict[str, str], source: str, target: str
) -> None:
    from .conftest import BARE

    mounts = (Mount(source, target, True, "data.path"),)
    plan = replace(BARE, argv=tuple(argv), env=tuple(env.items()), mounts=mounts)
    assert shlex.split(docker.show(plan)) == docker.command(plan)


@given(PATHS, PATHS, st.booleans())
def test_a_mount_reads_back_as_its_fields(source: str, target: str, read_only: bool) -> None:
    from .conftest import BARE

    plan = replace(BARE, mounts=(Mount(source, target, read_only, "data.path"),))
    argv = docker.command(plan)
    fields = next(csv.reader([argv[argv.index("--mount") + 1]], strict=True))
    assert fields[:3] == ["type=bind", f"source={source}", f"target={target}"]
    assert fields[3:] == (["readonly"] if read_only else [])


def test_the_folders_it_needs_are_made_first(full: Plan) -> None:
    first, second = docker.show(full).splitlines()
    assert shlex.split(first) == ["mkdir", "-p", "--", full.mounts[1].source]
    assert second.startswith("docker run ")


def test_the_value_of_a_passed_on_variable_is_never_shown(
    full: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    assert "secret" not in docker.show(full) + json.dumps(docker.request(full).body)


def test_count_is_what_the_request_says(bare: Plan) -> None:
    everything = replace(bare, gpus=Gpus(8, everything=True))
    argv = docker.command(everything)
    assert argv[argv.index("--gpus") + 1] == "all"
