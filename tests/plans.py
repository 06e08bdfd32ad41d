"""Run files in a folder of the test's own, and plans made of them without a machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.base.errors import UsageError
from launcher.runs.payload import Payload
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.mounts import Host
from launcher.runs.plan.plan import Plan, Stamp, make_plan
from launcher.runs.plan.resolved import resolve
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin, RunRequest
from launcher.runs.runfile.values import Gpus

PAYLOAD = Payload("PAYLOAD", "/home/user/runs/.payloads/PAYLOAD")
"""In place of the payload's digest, which each edit changes."""

HOST = Host(
    uid=1000,
    gid=100,
    home="/home/user",
    cwd="/home/user/work",
    cache="/home/user/.cache/x",
    payload=PAYLOAD,
)
STAMP = Stamp(run="0a1b2c3d", created="2025-01-02T03:04:05+00:00")
MINIMAL = "name: a\nimage: cpu\ngpus: 0\ndata: {mock: true}\n"

Planner = Callable[..., Plan]


def load(name: str, *sets: str) -> tuple[RunConfig, Origin]:
    """A preset or a run file, with --set arguments."""
    return origins.load(name, [origins.parse_set(one) for one in sets])


def request(cwd: str = "/", rest: tuple[str, ...] = (), **sections: Any) -> RunRequest:
    """What a run file of these sections asks for."""
    config = RunConfig.model_validate({"name": "a", "image": "cpu", "gpus": 0} | sections)
    return RunRequest(config, Origin("run.yaml", {}, {}), cwd, rest)


def plan_of(
    config: RunConfig,
    origin: Origin,
    facts: ImageFacts,
    host: Host = HOST,
    stamp: Stamp = STAMP,
    *,
    gpus: Gpus | None = None,
    rest: tuple[str, ...] = (),
    tie: bool = False,
) -> Plan:
    """The plan of a run file, without what a machine's GPUs decide."""
    run = resolve(config, origin, facts, host, stamp.run, gpus=gpus, rest=rest)
    return make_plan(run, host, stamp, tie=tie)


def refusal(plan: Planner, *args: object, **more: object) -> str:
    """What is said of a run file that has no plan."""
    with pytest.raises(UsageError) as caught:
        plan(*args, **more)
    return str(caught.value)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """Writes a run file and gives its path."""

    def write(text: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def plan(write: Callable[[str], str]) -> Planner:
    """The plan of a run file's text (or of a preset), with --set arguments."""

    def plan(
        text: str = MINIMAL,
        *sets: str,
        facts: ImageFacts = ImageFacts("0.16.1", True),  # noqa: B008 - frozen
        host: Host = HOST,
        rest: tuple[str, ...] = (),
    ) -> Plan:
        config, origin = load(write(text) if "\n" in text else text, *sets)
        return plan_of(config, origin, facts, host, rest=rest)

    return plan
