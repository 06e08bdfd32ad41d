"""A run file is settled once, whatever asks for what follows from it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from launcher import cli
from launcher.runs.plan import layout, render
from launcher.runs.runfile.config import RunConfig


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a run file was validated, laid out and rendered."""
    found = Counter[str]()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return function(*args, **kwargs)

        return call

    for name, function in {"laid out": layout.layout, "rendered": render.options}.items():
        for module in [each for name, each in sys.modules.items() if name.startswith("launcher.")]:
            for key in [key for key, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, key, counting(name, function))
    monkeypatch.setattr(
        RunConfig, "model_validate", counting("validated", RunConfig.model_validate)
    )
    return found


@pytest.mark.parametrize(
    "words",
    ["gpt2 --gpus 2", "llama3-8b --gpus 8 --tag 24.10 --set training.lr=1e-4", "gpt3-175b"],
)
def test_a_dry_run_settles_its_run_file_once(words: str, counted: Counter[str]) -> None:
    """It was validated 7 times, laid out 7 times and rendered 6 times."""
    assert cli.main(["run", *words.split(), "--dry-run"]) == 0
    assert counted == {"validated": 1, "laid out": 1, "rendered": 1}
