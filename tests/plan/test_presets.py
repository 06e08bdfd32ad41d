"""Every preset's dry run, kept as text: what is printed is what runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.backends import docker
from launcher.cli.describe import describe
from launcher.plan import source
from launcher.plan.image import Facts
from launcher.plan.plan import Plan

GOLDEN = Path(__file__).parent / "golden"
DRY_RUNS = {
    "gpt2.gpus-1": ("gpt2", "gpus=1"),
    "gpt2.gpus-2": ("gpt2", "gpus=2"),
    "gpt2.gpus-4": ("gpt2", "gpus=4"),
    "gpt2.gpus-8": ("gpt2", "gpus=8"),
    "gpt2.devices": ("gpt2", "gpus='device=1,3'"),
    "gpt2.cpu": ("gpt2", "gpus=0"),
    "gpt2.data": ("gpt2", "data.path=/data sets/corpus, one", "checkpoint.save=it's here"),
    "demo": ("demo", "data.path=corpus"),
    "gpt2-tiny": ("gpt2-tiny",),
    "gpt2-tiny.gpus-2": ("gpt2-tiny", "gpus=2"),
    "simple": ("simple",),
    "simple.cpu": ("simple", "gpus=0"),
    "gpt3-175b": ("gpt3-175b",),
}


@pytest.mark.parametrize("name", DRY_RUNS)
def test_a_dry_run_prints_what_it_did(name: str, plan: Callable[..., Plan]) -> None:
    preset, *sets = DRY_RUNS[name]
    made = plan(preset, *sets, facts=Facts("0.9.0", True))
    text = f"{describe(made)}\n{docker.show(made)}"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "UPDATE_GOLDEN=1 writes it anew"


def test_every_preset_has_a_dry_run_and_no_text_is_left_over() -> None:
    presets = {path.stem for path in source.PRESETS.glob("*.yaml")}
    assert presets == {preset for preset, *_ in DRY_RUNS.values()}
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(DRY_RUNS)


@pytest.mark.parametrize("preset", sorted(path.name for path in source.PRESETS.glob("*.yaml")))
def test_a_preset_says_first_what_it_is_for(preset: str) -> None:
    assert (source.PRESETS / preset).read_text(encoding="utf-8").startswith("# ")
