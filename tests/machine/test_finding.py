"""Warnings are printed, refusals are raised, all at once."""

from __future__ import annotations

import pytest

from launcher.errors import PreflightError
from launcher.machine import Finding, enforce


def test_warnings_let_a_run_start(capsys: pytest.CaptureFixture[str]) -> None:
    enforce([Finding("the disk is small", "it fills", "free some", refuse=False)])
    assert capsys.readouterr().err == (
        "launcher: warning: the disk is small\n  it fills\n  free some\n"
    )


def test_every_refusal_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [
        Finding("a", "b", "c", refuse=True),
        Finding("warned", "of", "this", refuse=False),
        Finding("d", "e", "f", refuse=True),
    ]
    with pytest.raises(PreflightError) as caught:
        enforce(findings)
    assert caught.value.exit_code == 121
    assert caught.value.problem == "a\n  b\n  c\nd\n  e\n  f"
    assert "--no-preflight" in caught.value.remedy
    assert "warned" in capsys.readouterr().err
