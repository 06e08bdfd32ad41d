"""A rank's exit code is its own, whatever threads it leaves behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from launcher.train.gpt.arguments import UsageError
from launcher.train.ranks import ending

from .conftest import environment


def fail(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UsageError("no such layout"), 2, "gpt: no such layout\n"),
        (ending.RunError("the disk is full"), 1, "gpt: the disk is full\n"),
        (ValueError("of a kind nobody foresaw"), 1, "ValueError: of a kind nobody foresaw\n"),
    ],
)
def test_code_and_words(
    error: Exception, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ending.code(lambda: fail(error)) == code
    printed = capsys.readouterr().err
    assert printed.endswith(words)
    assert ("Traceback" in printed) == isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UsageError("no such layout"), ""),
        (ending.RunError(""), ""),
        (ending.RunError("the disk is full"), "gpt: the disk is full\n"),
        (RuntimeError("[pair.cc:53] Connection closed by peer"), "gpt: rank 1 has lost another"),
    ],
)
def test_what_rank_1_says(
    error: Exception,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", "1")
    assert ending.code(lambda: fail(error)) in (1, 2)
    printed = capsys.readouterr().err
    assert printed.startswith(words)
    assert printed.count("\n") == bool(words)


ABORTS_AT_EXIT = """
import atexit, os
from launcher.train.ranks import ending
atexit.register(os.abort)
print("said", end="")
ending.leave({code})
"""


@pytest.mark.parametrize(("code", "seen"), [(1, 1), (2, 2), (0, -6)])
def test_a_failure_runs_no_destructor(code: int, seen: int) -> None:
    """An exit handler stands in for a static destructor that aborts."""
    command = [sys.executable, "-c", ABORTS_AT_EXIT.format(code=code)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == seen
    assert code == 0 or done.stdout == "said"
