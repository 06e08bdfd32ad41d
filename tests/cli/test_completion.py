"""`launcher completion`: the script in a real bash, and zsh's as text."""

from __future__ import annotations

import argparse
import shlex
import subprocess
from pathlib import Path

import pytest

from launcher import cli
from launcher.cli import completion
from launcher.follow import find
from launcher.plan.source import PRESETS

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
    ],
)
def test_bash_offers(bash: Path, tmp_path: Path, words: list[str], offered: list[str]) -> None:
    (tmp_path / "mine.yaml").touch()
    assert completed(bash, tmp_path, *words) == offered


def test_bash_offers_every_command(bash: Path, tmp_path: Path) -> None:
    assert completed(bash, tmp_path, "") == sorted(cli.COMMANDS)


def test_bash_offers_presets_and_files(bash: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    presets = [path.name for path in PRESETS.glob("*.yaml")]
    assert completed(bash, tmp_path, "run", "") == sorted([*presets, "mine.yaml"])


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


def test_the_parser_of_a_command_is_left_alone() -> None:
    completion.script("bash")
    args = cli.parser(["run"]).parse_args(["run", "x.yaml", "--tag", "of-mine"])
    assert args.tag == "of-mine"
