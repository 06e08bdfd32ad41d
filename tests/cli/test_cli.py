"""What the command line makes of errors that no command foresaw."""

from __future__ import annotations

import errno
import io
import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import APIError

from launcher import cli
from launcher.cli.command import Command
from launcher.plan.job import Lost


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
    fail(monkeypatch, error)
    assert cli.main([]) == code
    assert f"\n  {code} " in cli.EXIT_CODES
    printed = capsys.readouterr().err
    assert printed == (f"launcher: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("image build 24.10 --base=-v/:/host", "--base"),
        ("image build 24.10 --builder=a/../b", "--builder"),
        ("image save ../../containers/x -o a", "TAG"),
        ("image push a --registry=-x", "--registry"),
        ("image pull a?b", "NAME"),
        ("matrix compat --base=--privileged", "--base"),
        ("shell a#b", "TAG"),
        ("doctor --nccl --tag ../a", "--tag"),
    ],
)
def test_an_image_that_would_be_an_option_or_lead_elsewhere_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, wrong: str
) -> None:
    """It goes on to docker's command line, or into the path of what an engine is asked."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words.split())
    assert caught.value.code == 2
    assert f"error: argument {wrong}: " in capsys.readouterr().err


def test_a_shell_s_wrong_gpus_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """They were a traceback."""
    assert cli.main(["shell", "--gpus", "x", "cpu"]) == 2
    assert "launcher: shell: gpus: 'x' isn't a request for GPUs" in capsys.readouterr().err


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Have the next command raise the error."""

    def main(args: object) -> int:
        raise error

    monkeypatch.setattr(cli, "find_command", lambda name: main)
    monkeypatch.setattr(cli, "parser", lambda argv: SimpleNamespace(parse_args=cli_args))


def test_an_error_that_nobody_foresaw_is_one_line_and_a_private_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It was a traceback, with exit code 1."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fail(monkeypatch, KeyError("a\nb\x1b[2J"))
    assert cli.main(["image", "build", "--base", "https://me:secret@host/x"]) == 70
    assert "\n  70 " in cli.EXIT_CODES
    said = capsys.readouterr().err
    (kept,) = tmp_path.iterdir()
    assert said == (
        "launcher: image build: an error that nobody foresaw: "
        f"KeyError: 'a\\nb\\x1b[2J'; its traceback: {kept}\n"
    )
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "in main\n    raise error\nKeyError: " in kept.read_text(encoding="utf-8")


def test_an_unforeseen_error_is_told_where_nothing_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    fail(monkeypatch, RecursionError())
    assert cli.main(["ps"]) == 70
    assert capsys.readouterr().err == (
        "launcher: ps: an error that nobody foresaw: RecursionError; its traceback: "
        "can't be kept (No such file or directory): LAUNCHER_TRACEBACK=1 prints it\n"
    )


def test_a_developer_sees_the_traceback_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAUNCHER_TRACEBACK", "1")
    fail(monkeypatch, KeyError("x"))
    with pytest.raises(KeyError):
        cli.main(["ps"])


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit()])
def test_what_is_meant_to_end_the_program_does(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Only errors are caught, not what Python ends a program by."""
    fail(monkeypatch, error)
    with pytest.raises(type(error)):
        cli.main(["ps"])


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

    def run(args: Namespace) -> int:
        given.extend(args.rest)
        return 0

    run.__name__ = command
    monkeypatch.setattr(cli, "find_command", lambda name: Command(run, (), {}))
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


def test_a_log_of_any_training_is_explained_from_a_file_or_standard_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "slurm-1.out"
    log.write_text("training\n[rank3]: RuntimeError: CUDA error: out of memory\n")
    assert cli.main(["explain", str(log)]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "cause: GPU memory is out",
        "said: line 2, rank 3: [rank3]: RuntimeError: CUDA error: out of memory",
    ]
    stdin = SimpleNamespace(buffer=io.BytesIO(b"training\nValueError: no gizmo\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.main(["explain", "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["causes"], told["suspects"][0]["text"]) == ([], "ValueError: no gizmo")
