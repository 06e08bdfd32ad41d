"""Runs and machines made up for the checks: nothing is looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from launcher.runs.checks.checks import preflight
from launcher.runs.checks.machine import Engine, Finding, Gpu, Machine
from launcher.runs.plan.image_facts import ImageFacts
from launcher.runs.plan.plan import Plan, make_plan
from launcher.runs.plan.resolved import Resolved, resolve
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.origins import Origin
from tests.plans import HOST, STAMP, load

ENGINE = Engine("27.0", "unix:///run/docker.sock", True, False, "v2 (systemd)", gpus=True)
GB = 10**9


def card(
    index: int = 0,
    name: str = "NVIDIA H100 80GB HBM3",
    total: int = 85 * GB,
    used: int = 0,
    capability: tuple[int, int] | None = (9, 0),
    driver: str = "560.35.03",
) -> Gpu:
    """A GPU; GPU-0, GPU-1 … are their UUIDs."""
    return Gpu(index, f"GPU-{index}", name, total, used, capability, driver)


@dataclass(frozen=True)
class Asked:
    """A run as it was asked for, with its plan."""

    run: Resolved
    plan: Plan

    @property
    def config(self) -> RunConfig:
        return self.run.config

    @property
    def origin(self) -> Origin:
        return self.run.origin

    def on(self, machine: Machine, cuda: str | None = None) -> list[Finding]:
        """What is wrong with it on `machine`."""
        return preflight(self.run, self.plan, machine, cuda)


Asker = Callable[..., Asked]


@pytest.fixture
def asked() -> Asker:
    """A preset with --set arguments."""

    def asked(preset: str = "gpt2", *sets: str, rest: tuple[str, ...] = ()) -> Asked:
        config, origin = load(preset, *sets)
        facts = ImageFacts("0.9.0", True)
        run = resolve(config, origin, facts, HOST, STAMP.run, rest=rest)
        return Asked(run, make_plan(run, HOST, STAMP))

    return asked
