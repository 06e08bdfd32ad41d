"""What the command line makes of errors that no command foresaw."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from docker.errors import APIError

from launcher import cli
from launcher.backends import Lost


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 2, "/a/b: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
        (APIError("conflict"), 125, "the engine: conflict"),
        (Lost("gone"), 125, "the engine was lost: gone"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_it_is_one_line_and_a_documented_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    def main(args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "import_module", lambda name: SimpleNamespace(main=main))
    monkeypatch.setattr(cli, "_parser", lambda argv: SimpleNamespace(parse_args=cli_args))
    assert cli.main([]) == code
    assert f"\n  {code} " in cli.EXIT_CODES
    printed = capsys.readouterr().err
    assert printed == (f"launcher: {said}\n" if said else "")


def cli_args(argv: list[str]) -> SimpleNamespace:
    """Arguments that name some command."""
    return SimpleNamespace(command="run")


@pytest.mark.parametrize("argv", [["ps", "--", "x"], ["doctor", "--", "--images"]])
def test_what_stands_behind_two_dashes_is_never_dropped(
    capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    said = capsys.readouterr().err
    assert "unrecognized arguments: " in said
    assert said.endswith(f" {argv[-1]}\n")


def test_a_text_may_begin_with_a_dash(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launcher.data.install.install", lambda: None)
    assert cli.main(["data", "vocab", "--", "-5"]) == 0
    assert "'-'" in capsys.readouterr().out


@pytest.mark.parametrize("command", cli.WITH_REST)
def test_another_programs_words_are_its_own(monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    given: list[str] = []

    def main(args: SimpleNamespace) -> int:
        given.extend(args.rest)
        return 0

    monkeypatch.setattr(
        cli, "import_module", lambda name: SimpleNamespace(main=main, arguments=id, HELP="")
    )
    cli.main([command, "--", "--lr", "1", "--"])
    assert given == ["--lr", "1", "--"]


def test_a_user_without_a_home_folder_is_told_to_name_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert cli.main(["ps"]) == 2
    problem, remedy = capsys.readouterr().err.splitlines()
    assert problem.endswith("has no home folder")
    assert "export HOME=" in remedy
