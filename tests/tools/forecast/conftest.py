"""What the tests of forecasts share: what a command prints as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher import cli

Said = Callable[..., dict[str, Any]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], folder: Path) -> Said:
    """What a command prints as JSON, where there are no records but a test's own."""

    def said(*words: str) -> dict[str, Any]:
        assert cli.main([*words, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return said
