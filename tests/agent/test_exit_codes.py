"""A rank's exit code is its own, whatever threads it leaves behind."""

from __future__ import annotations

import pytest

from launcher.agent.ranks import exit_codes
from launcher.agent.ranks.exit_codes import OptionError

from .conftest import python


def fail(error: Exception) -> None:
    raise error


SAID = OptionError("no such layout"), exit_codes.RunError("the disk is full")
FOUND_BY_ANOTHER = RuntimeError("[pair.cc:53] Connection closed by peer")


@pytest.mark.parametrize(
    ("rank", "error", "code", "words"),
    [
        ("0", SAID[0], 2, "gpt: no such layout\n"),
        ("0", SAID[1], 1, "gpt: the disk is full\n"),
        ("1", SAID[0], 2, ""),
        ("1", SAID[1], 1, "gpt: the disk is full\n"),
        ("1", exit_codes.RunError(""), 1, ""),
        ("1", FOUND_BY_ANOTHER, 1, "gpt: rank 1 has lost another rank\n"),
    ],
)
def test_code_and_words(
    rank: str,
    error: Exception,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert exit_codes.code(lambda: fail(error)) == code
    assert capsys.readouterr().err == words


def test_what_nobody_foresaw_has_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_codes.code(lambda: fail(ValueError("of another kind"))) == 1
    assert "Traceback" in capsys.readouterr().err


ABORTS_AT_EXIT = """
import atexit, os
from launcher.agent.ranks import exit_codes
atexit.register(os.abort)
print("said", end="")
exit_codes.leave({code})
"""


@pytest.mark.parametrize(("code", "seen"), [(1, 1), (2, 2), (0, -6)])
def test_a_failure_runs_no_destructor(code: int, seen: int) -> None:
    """An exit handler stands in for a static destructor that aborts."""
    done = python("-c", ABORTS_AT_EXIT.format(code=code))
    assert done.returncode == seen
    assert code == 0 or done.stdout == "said"
