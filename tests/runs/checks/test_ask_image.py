"""An image is asked whether its Megatron takes the options, by a stand-in for its engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import EngineError
from launcher.runs.backends.docker.docker import DockerBackend
from launcher.runs.checks.machine import Finding, Machine
from launcher.runs.follow import ask_image
from launcher.runs.payload import KEY
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.job import OutputPiece
from launcher.runs.plan.mounts import Mount
from launcher.runs.plan.plan import Plan
from tests.runs.checks.conftest import Asker, card
from tests.tables import table

UPSTREAM = ("program=pretrain_gpt.py", "gpus=2")
SENT = Mount("/payloads/d/launcher", "/opt/launchpad/launcher", True, KEY)
OTHER = Mount("/data", "/data", True, "data.path")


class Answering(DockerBackend):
    """A stand-in for an engine: what it starts is a process here, that says what the test says."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self.__dict__ |= {"program": program, "started": list[Plan]()}

    def facts(self, image: str) -> ImageFacts:
        return ImageFacts("0.9.0", True)

    def rootless(self) -> bool:
        return False

    def identity(self, image: str) -> Mapping[str, Any]:
        return {"id": "sha256:" + "1" * 64}

    def start(self, plan: Plan, *, attach: bool) -> Any:
        self.__dict__["started"].append(plan)
        if self.__dict__["program"] == "refused":
            raise EngineError("the engine says no")
        return Process(self.__dict__["program"])


class Process:
    """A stand-in for a job."""

    def __init__(self, program: str) -> None:
        argv = [sys.executable, "-c", program]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE)

    def output(self) -> Iterator[OutputPiece]:
        assert self.process.stdout
        yield OutputPiece(False, self.process.stdout.read())

    def kill(self) -> None:
        self.process.kill()

    def remove(self) -> None:
        self.process.kill()
        self.process.communicate()


def found(asked: Asker, engine: Answering, cache: Path, *sets: str) -> list[Finding]:
    plan = replace(asked("gpt2", *UPSTREAM, *sets).plan, mounts=(SENT, OTHER))
    return [*ask_image.ask_image(plan, Machine(gpus=(card(capability=(8, 0)),)), engine, cache)]


def test_a_refusal_is_told_and_kept(asked: Asker, tmp_path: Path) -> None:
    """Only what the static rules know was refused; the rest died minutes later."""
    refusal = '{"refused": "no such thing", "where": "megatron/training/arguments.py:7"}'
    engine = Answering(f"print('loading'); print({refusal!r})")
    for _ in range(2):
        (finding,) = found(asked, engine, tmp_path)
        assert finding.refuse
        assert "no such thing" in finding.what
        assert "arguments.py:7" in finding.why
    (plan,) = engine.__dict__["started"]
    assert (plan.network, plan.gpus.count) == ("none", 0)
    assert plan.mounts == (SENT,)  # without it, `validate` found no launcher to import
    assert plan.argv[1:3] == ("/opt/launchpad/launcher/agent/start.py", "validate")
    words = plan.argv[3:]
    assert words[:4] == ("--world-size", "2", "--capability", "8.0")
    assert words[4] == "/opt/megatron/src/pretrain_gpt.py"
    found(asked, engine, tmp_path, "training.lr=0.1")
    assert len(engine.__dict__["started"]) == 2


@table("program")
def test_a_failure_to_ask_is_a_note_and_refuses_nothing(
    asked: Asker, tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a cache that can't be written."""
    monkeypatch.setattr(ask_image, "DEADLINE", 1)
    if program == "print('{}')":
        (tmp_path / "asked").write_bytes(b"")
    (finding,) = found(asked, Answering(program), tmp_path)
    assert not finding.refuse
    assert "couldn't be asked" in finding.what


def test_a_compose_project_is_asked_in_one_container(
    asked: Asker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, engine = Answering(""), Answering("print('{}')")
    project.__dict__ |= {"name": "compose", "every_node": True}
    monkeypatch.setattr(ask_image, "backend", {"docker": engine}.__getitem__)
    assert found(asked, project, tmp_path) == []
    assert len(engine.__dict__["started"]) == 1
    assert project.__dict__["started"] == []


@pytest.mark.parametrize("sets", [("program=gpt",), ("program=./mine.py",)])
def test_other_programs_are_not_asked(asked: Asker, tmp_path: Path, sets: tuple[str, ...]) -> None:
    engine = Answering("print('{}')")
    assert found(asked, engine, tmp_path, *sets) == []
    assert engine.__dict__["started"] == []


class Here(Answering):
    """A stand-in for the local backend: no engine, and this Python."""

    has_engine = False


def test_where_there_is_no_engine_the_payload_asks_here(asked: Asker, tmp_path: Path) -> None:
    """On the local backend nobody asked, and each rank died by itself."""
    entry = tmp_path / "start.py"  # a stand-in for the payload's
    entry.write_text(
        "import json, sys\nprint(json.dumps({'refused': ' '.join(sys.argv[1:4]), 'where': 'x:1'}))"
    )
    plan = replace(
        asked("gpt2", *UPSTREAM).plan,
        argv=(sys.executable, str(entry), "runner", "--", "/m/pretrain_gpt.py", "--lr", "1"),
        workdir=str(tmp_path),
    )
    [finding] = ask_image.ask_image(plan, Machine(), Here(""), tmp_path / "cache")
    assert finding.refuse
    assert "doesn't take these options: validate --world-size 2" in finding.what
    mine = replace(plan, program="./pretrain_mine.py")
    assert not [*ask_image.ask_image(mine, Machine(), Here(""), tmp_path / "cache")]
