"""What the tests of several tools share: a folder of records of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from launcher import cli

Here = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Here:
    """Runs a command in this process: what `launcher` gives of one that starts, a second sooner."""

    def here(*words: str) -> CompletedProcess[str]:
        try:
            code = cli.main([*words])
        except SystemExit as usage:
            code = int(usage.code or 0)
        return CompletedProcess(words, code, *capfd.readouterr())

    return here


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's records lie; it isn't there yet."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"
