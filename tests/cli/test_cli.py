"""Commands parsed and called; words completed; run's own options."""

from __future__ import annotations

import argparse
import errno
import io
import json
import shlex
import subprocess
import sys
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import APIError

from launcher import cli
from launcher.base.settings import ROOT, Settings
from launcher.cli import completion
from launcher.cli.command import Command
from launcher.images.engine.private.packages import unpack
from launcher.runs.follow import find
from launcher.runs.plan.job import ConnectionLost
from launcher.runs.runfile.origins import PRESETS
from tests.tables import table

WITHOUT_TOOLS = """
import sys
from launcher import cli

class Deleted:
    refused = ("launcher.tools.",)
    def find_spec(self, name, path=None, target=None):
        if f"{name}.".startswith(self.refused):
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, deleted := Deleted())
cli.parser()  # of all commands
deleted.refused = tuple(f"launcher.tools.{tool}." for tool in sys.argv[1:])
words = ["runs prune --keep 1", "matrix list", "init"]
assert [cli.main(line.split()) for line in words] == [0] * len(words)
"""


def test_tools_may_be_deleted() -> None:
    """`runs prune` needed bisect. Their import is refused here, as that of what isn't there."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    listed = page.partition("You may delete")[2].partition("the tools")[2].partition("backends")[0]
    tools = [name for name in listed.split("`") if name.isidentifier()]
    assert {"bisect", "board"} < {*tools}
    command = [sys.executable, "-c", WITHOUT_TOOLS, *tools]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


NO_ROOM = (
    "ps: the system gives this process no more memory or threads\n"
    "  Raise what `ulimit -v` and `ulimit -u` show, or free memory."
)
"""Under a small `ulimit -v`, `ps` ended with 70, as if the launcher were wrong."""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), 2, "/a/b: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), 2, "No space left on device"),
        (APIError("conflict"), 125, "the engine: conflict"),
        (ConnectionLost("gone"), 125, "the engine was lost: gone"),
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 2, NO_ROOM),
        (RuntimeError("can't start new thread"), 2, NO_ROOM),
        (OSError(errno.ENOMEM, "Cannot"), 2, NO_ROOM),
    ],
)
def test_it_is_one_message_and_a_documented_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    said: str,
) -> None:
    fail(monkeypatch, error)
    assert cli.main(["ps"]) == code
    assert f"\n  {code} " in cli.EXIT_CODES
    printed = capsys.readouterr().err
    assert printed == (f"launcher: {said}\n" if said else "")


@table("words", "wrong")
def test_an_image_that_would_be_an_option_or_lead_elsewhere_is_refused(
    capsys: pytest.CaptureFixture[str], words: str, wrong: str
) -> None:
    """It goes on to docker's command line, or into the path of what an engine is asked."""
    with pytest.raises(SystemExit) as caught:
        cli.main(words.split())
    assert caught.value.code == 2
    assert f"error: argument {wrong}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "of"), [("shell --gpus x cpu", "shell: "), ("doctor --backend local --gpus x", "")]
)
def test_wrong_gpus_are_told(capsys: pytest.CaptureFixture[str], words: str, of: str) -> None:
    """A shell's were a traceback."""
    assert cli.main(words.split()) == 2
    assert f"launcher: {of}gpus: 'x' isn't a request for GPUs" in capsys.readouterr().err


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
        "launcher: image build: an unexpected error: "
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
        "launcher: ps: an unexpected error: RecursionError; its traceback: "
        "can't be kept (No such file or directory): LAUNCHER_TRACEBACK=1 prints it\n"
    )


@pytest.mark.parametrize(
    ("error", "traceback"), [(SystemExit(3), ""), (GeneratorExit(), ""), (KeyError("x"), "1")]
)
def test_what_ends_the_program_does_and_a_developer_sees_the_traceback_at_once(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, traceback: str
) -> None:
    """Only errors are caught, not what Python ends a program by."""
    monkeypatch.setenv("LAUNCHER_TRACEBACK", traceback)
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
    monkeypatch.setattr("launcher.base.install.install", lambda _=None: None)
    assert cli.main(["data", "vocab", "--", "-5"]) == 0
    assert "'-'" in capsys.readouterr().out


def test_the_folder_of_data_is_made_before_anything_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """76 s of installing came before "no such folder"."""
    made = list[bool]()
    target = tmp_path / "new/data/mine"
    monkeypatch.setattr(
        "launcher.base.install.install", lambda _=None: made.append(target.parent.is_dir())
    )
    assert cli.main(["data", "tokenize", "absent.txt", "--output-prefix", str(target)]) == 2
    assert made == [True]


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
        "log: line 2, rank 3: [rank3]: RuntimeError: CUDA error: out of memory",
    ]
    stdin = SimpleNamespace(buffer=io.BytesIO(b"training\nValueError: no gizmo\n"))
    monkeypatch.setattr("sys.stdin", stdin)
    assert cli.main(["explain", "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (
        told["suspects"][0]["text"] == told["causes"][0]["said"]["text"] == "ValueError: no gizmo"
    )
    assert told["causes"][0]["certainty"] == "located"
    log.write_text("  File \"/x/train.py\", line 7, in main\nKeyError: 'gizmo'\n")
    assert cli.main(["explain", str(log)]) == 1  # where it failed is no cause
    assert capsys.readouterr().out.startswith("where it failed: raised by main of ")


DRIVER = """\
launcher() {{
  case "$*" in
    "ps --quiet") printf 'abc123\\ndef456\\n' ;;
    "completion resumable") printf 'fed654\\n' ;;
    "runs --quiet") printf 'fed654\\ncba321\\n' ;;
  esac
}}
source {script}
COMP_WORDS=({words}) COMP_CWORD={last}
$(complete -p launcher | sed 's/.*-F \\([^ ]*\\).*/\\1/')
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "launcher.bash"
    path.write_text(completion.script("bash"), encoding="utf-8")
    return path


def completed(script: Path, folder: Path, *words: str) -> list[str]:
    """What bash offers for the last of these words behind `launcher`."""
    driver = DRIVER.format(
        script=shlex.quote(str(script)), words=shlex.join(["launcher", *words]), last=len(words)
    )
    command = ["bash", "--norc", "-c", driver]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    assert done.stderr == ""
    return sorted(filter(None, done.stdout.splitlines()))


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["att"], ["attach"]),
        (["run", "--dry"], ["--dry-run"]),
        (["run", "gpt2-"], ["gpt2-tiny.yaml"]),
        (["init", "gpt2-"], ["gpt2-tiny.yaml"]),
        (["run", "min"], ["mine.yaml"]),
        (["run", "gpt2.yaml", "--tag", "24.0"], [f"24.0{month}" for month in range(2, 10)]),
        (["run", "--tag", "24.10", "gpt2-"], ["gpt2-tiny.yaml"]),
        (["run", "--backend", "c"], ["compose"]),
        (["run", "--backend", "l"], ["local"]),
        (["image", "build", "24.1"], ["24.10"]),
        (["image", "build", "24.09", "--megatron", "0.9"], ["0.9.0"]),
        (["matrix", "lo"], ["lock"]),
        (["matrix", "render", "--ch"], ["--check"]),
        (["stop", "a"], ["abc123"]),
        (["logs", ""], ["abc123", "def456"]),
        (["resume", ""], ["fed654"]),
        (["rerun", ""], ["cba321", "fed654"]),
        (["plot", "fed654", "c"], ["cba321"]),
        (["runs", "show", "c"], ["cba321"]),
        (["run", "gpt2.yaml", "--nonsense"], []),
        ([""], sorted(cli.COMMANDS)),
        (["run", ""], sorted([*(path.name for path in PRESETS.glob("*.yaml")), "mine.yaml"])),
    ],
)
def test_bash_offers(bash: Path, tmp_path: Path, words: list[str], offered: list[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    assert completed(bash, tmp_path, *words) == offered


def test_the_runs_to_resume_are_printed_by_id(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(find, "resumable", lambda: ["fed654", "aa11"])
    assert completion.completion(argparse.Namespace(what="resumable")) == 0
    assert capsys.readouterr().out == "fed654\naa11\n"


def test_zsh_has_the_same_commands_and_values() -> None:
    text = completion.script("zsh")
    assert text.startswith("#compdef launcher")
    for word in [*cli.COMMANDS, "24.10", "gpt2-tiny.yaml", "docker"]:
        assert word in text


@pytest.mark.long
def test_zsh_completes_after_what_the_page_prints(site: Settings) -> None:
    """The page had `source <(…)`, for which zsh registers nothing: an error at each start."""
    page = (ROOT / "docs/runs.md").read_text(encoding="utf-8")
    line = next(one for one in page.splitlines() if "completion zsh" in one)
    line = line.replace("launcher completion", f"{sys.executable} -m launcher completion")
    zsh = unpack(site.cache / "zsh", ["zsh-static"]) / "bin/zsh-static"
    told = f"compdef() {{ print $1 for $3 }}\n{line}"
    done = subprocess.run([zsh, "-fc", told], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("_shtab_launcher for launcher\n", "")


def test_the_parser_of_a_command_is_left_alone() -> None:
    completion.script("bash")
    args = cli.parser(["run"]).parse_args(["run", "x.yaml", "--tag", "of-mine"])
    assert args.tag == "of-mine"


def run(folder: Path, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and messages of `launcher run` in a folder, where no engine answers."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
        code = cli.main(["run", *arguments])
    return code, out.getvalue(), err.getvalue()


def test_a_dry_run_needs_no_engine(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "--gpus", "2", "gpt2.yaml", "--dry-run")
    assert code == 0
    told = "launcher: training.precision: auto is "
    assert err.startswith(told)
    assert err.splitlines()[1] == "forecast for 2 × GPU:"
    assert err.splitlines()[2].startswith("  memory      ")
    assert f"--{err.removeprefix(told)[:4]}\n" in out
    assert f"/checkpoints <- {tmp_path}/checkpoints/gpt2 (read-write)" in out
    assert out.splitlines()[-1].startswith("docker run --rm --name gpt2-")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_tells_what_files_are_not_there_yet(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, "gpt2-tiny", "--dry-run", "--set", "data.path=corpus")
    assert code == 0
    assert err.splitlines()[:2] == [
        f"launcher: data.path: no such file or folder: {tmp_path}/corpus{end}"
        for end in (".bin", ".idx")
    ]


def test_a_wrong_path_of_data_is_named_with_what_is_beside_it(tmp_path: Path) -> None:
    """Without data.vocab_size, that alone was missed, and the path was not named."""
    (tmp_path / "corpus_text_document.idx").touch()
    text = (PRESETS / "gpt2-tiny.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("  vocab_size: 256\n", ""))
    code, _, err = run(tmp_path, "mine.yaml", "--set", "data.path=corpus")
    assert code == 2
    assert f"{tmp_path}/corpus." in err
    assert "Did you mean 'corpus_text_document'?" in err
    (tmp_path / "corpus.jsonl").touch()
    err = run(tmp_path, "mine.yaml", "--set", "data.path=corpus.jsonl")[2]
    assert f"--set 'data.text=[{tmp_path}/corpus.jsonl]'" in err


def test_a_run_does(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "gpt2-tiny")
    assert (code, out) == (125, "")
    assert "DOCKER_HOST" in err
    assert list(tmp_path.iterdir()) == []


@table("arguments", "said")
def test_a_mistake_is_a_message_and_exit_code_2(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    at = arguments.index("--") if "--" in arguments else len(arguments)
    code, out, err = run(tmp_path, *arguments[:at], "--dry-run", *arguments[at:])
    assert (code, out) == (2, "")
    assert err.startswith("launcher: ")
    assert said in err
    assert "Traceback" not in err


def test_processes_are_given_to_run_as_to_resume(tmp_path: Path) -> None:
    code, out, err = run(tmp_path, "gpt2-tiny", "--processes", "4", "--dry-run")
    assert code == 0
    assert "launcher: " not in err
    assert "processes: 4\n" in out


def test_the_rest_reaches_the_program(tmp_path: Path) -> None:
    _, out, _ = run(tmp_path, "gpt2", "--dry-run", "--", "--exit-interval", "5")
    assert out.splitlines()[-1].endswith(" --exit-interval 5")
