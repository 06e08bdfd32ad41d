"""Words of the command line: versions, wrong options, patterns of names, chosen lines, JSON."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher import __version__, cli
from launcher.api import Run
from launcher.base.errors import UsageError
from launcher.base.settings import ROOT
from launcher.cli import completion, tune
from launcher.images.carry import prune
from launcher.runs.follow import find, from_record, lines
from launcher.runs.records import record
from launcher.runs.runfile import origins
from launcher.runs.runfile.origins import RunRequest
from launcher.tools.tuning.candidates import Setting
from launcher.tools.tuning.search import Measurement
from tests.tables import table


def said(capsys: pytest.CaptureFixture[str], words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(words.split())
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_the_help_needs_no_command_and_says_what_each_does() -> None:
    """`launcher` alone was an error, and the table of helps could differ from the docstrings."""
    assert {name: cli.find_command(name).help for name in cli.COMMANDS} == {
        name: about for name, (_, about) in cli.COMMANDS.items()
    }


def test_the_help_imports_no_command() -> None:
    """It took as long as 5.6 bare Pythons."""
    code = "import sys; from launcher import cli\ntry: cli.main(['--help'])\nfinally: " + (
        "print(*(n for n in sys.modules if n.startswith('launcher.cli.')), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.split() == []


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """They were "the following arguments are required: COMMAND"."""
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0
    assert "start the training that a run file describes" in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`--version` was an unknown argument."""
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"launcher {__version__}\n"


@table("words", "usage", "wrong", "remedy")
def test_a_wrong_option_shows_its_command_s_usage_and_the_nearest(
    capsys: pytest.CaptureFixture[str], words: str, usage: str, wrong: str, remedy: str
) -> None:
    """It showed the usage of `launcher` alone, and no word on what was meant."""
    told = said(capsys, words)
    assert told.startswith(f"usage: {usage}")
    assert f"unrecognized option: {wrong}\n" in told
    assert remedy.removeprefix("Did you mean") in told


@pytest.mark.parametrize(("words", "meant"), [("rnu x", "run"), ("image bulid --all", "build")])
def test_a_wrong_command_is_answered_with_the_nearest(
    capsys: pytest.CaptureFixture[str], words: str, meant: str
) -> None:
    """It listed 26 commands, and none as the likeliest."""
    assert f"Did you mean {meant!r}?" in said(capsys, words)


@table("words", "option")
def test_where_to_has_one_name_and_the_older_ones_hold(words: str, option: str) -> None:
    """Five names were to be known for one thing."""
    given = words.split()
    parsed = [
        vars(cli.parser(given).parse_args([*given, each, "to"]))
        for each in ("--output", "-o", option)
    ]
    assert parsed[0] == parsed[1] == parsed[2]
    assert "to" in map(str, parsed[0].values())


@pytest.mark.parametrize("command", ["resume", "rerun"])
def test_what_would_go_on_or_be_repeated_can_be_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """`--dry-run` was `run`'s alone, and the others started at once."""
    config, origin = origins.load("gpt2-tiny", [])
    asked = RunRequest(config, origin, "/"), ["a note"]
    monkeypatch.setattr(record, "find", lambda text: SimpleNamespace(backend="docker"))
    monkeypatch.setattr(from_record, "resumed", lambda *_, **__: asked)
    monkeypatch.setattr(from_record, "repeated", lambda *_, **__: asked)
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    assert cli.main([command, "abc", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[-1].startswith("docker run --rm --name gpt2-tiny-")
    assert "launcher: a note\n" in err


LOG = b"""\
begun
 [2026-05-01 12:00:00] iteration 1
 between
 [2026-05-01 12:10:00] iteration 2
 [2026-05-01 12:20:00] iteration 3
"""


def written(run: Run, *, follow: bool = False) -> list[tuple[bool, bytes]]:
    """The log in pieces that end where no line does."""
    return [(False, LOG[at : at + 7]) for at in range(0, len(LOG), 7)]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ([], b"begun"),
        (["--tail", "2"], b" [2026-05-01 12:10:00] iteration 2"),
        (["--tail", "1", "--follow"], b" [2026-05-01 12:20:00] iteration 3"),
        (["--tail", "0"], None),
        (["--since", "2026-05-01 12:05"], b" [2026-05-01 12:10:00] iteration 2"),
        (["--since", "2026-05-01 12:00", "--tail", "3"], b" between"),
    ],
)
def test_the_end_of_a_log_can_be_asked_for(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    options: Sequence[str],
    first: bytes | None,
) -> None:
    """All of a log was printed, gigabytes of it."""
    monkeypatch.setattr(Run, "output", written)
    assert cli.main(["logs", "abc", *options]) == 0
    printed = capfdbinary.readouterr().out
    assert printed == (b"" if first is None else LOG[LOG.index(first) :])


@pytest.mark.parametrize(("age", "printed"), [("10m", True), ("1m", False)])
def test_lines_before_the_first_time_are_of_the_run_s_start(
    monkeypatch: pytest.MonkeyPatch,
    capfdbinary: pytest.CaptureFixture[bytes],
    age: str,
    printed: bool,
) -> None:
    """A run that failed before its first step had no line since any time."""
    created = (datetime.now(timezone.utc) - timedelta(minutes=5)).isoformat()
    kept = SimpleNamespace(backend="docker", created=created)
    monkeypatch.setattr(record, "find", lambda text: kept)
    monkeypatch.setattr(Run, "output", lambda run, *, follow: iter([(True, b"Traceback\n")]))
    assert cli.main(["logs", "abc", "--since", age]) == 0
    assert capfdbinary.readouterr().err == b"Traceback\n" * printed


LEAVES = """\
import sys
from launcher import cli
from launcher.cli import completion
completion.script = lambda shell: "left in the buffer"
sys.exit(cli.main(["completion", "fish"]))
"""


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """`launcher completion fish | head -3` ended with an exception that Python ignored."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        argv = [sys.executable, "-c", LEAVES]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            argv, cwd=ROOT, env=env, stdout=gone, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_an_age_is_taken_from_now_in_the_log_s_zone() -> None:
    """A container's log is in UTC, and the host's clock may not be."""
    then = lines.parse_since("10m", timezone.utc)
    now = datetime.now(timezone.utc).replace(tzinfo=None)
    assert timedelta(minutes=10) <= now - then < timedelta(minutes=11)
    with pytest.raises(UsageError, match="neither an age nor a time"):
        lines.parse_since("yesterday", None)


def test_a_pattern_names_all_runs_whose_names_fit() -> None:
    """`stop` and `plot` took one run a word."""
    known = [("a1", "gpt2-b"), ("b1", "llama"), ("c1", "gpt2-a")]
    assert record.expanded(["gpt2-*", "llama", "c1"], known) == ["a1", "c1", "llama"]
    assert record.expanded(["x*"], known) == ["x*"]
    assert record.match("gpt2-?", known, "") == "a1"


def test_what_goes_on_is_told_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts had to cut `ps` into columns."""
    row = ("a1", "mine", "running", "docker", "1", "megatron:24.10", "2026-05-01", "iteration 5")
    monkeypatch.setattr(find, "everywhere", lambda: ([], []))
    monkeypatch.setattr(find, "rows", lambda known: [row])
    assert cli.main(["ps", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"], told["checkpoint"]) == ("a1", "running", "iteration 5")


def test_the_matrix_is_told_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """It was a table in Markdown alone."""
    assert cli.main(["matrix", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows"]["24.10"]["megatron"]
    assert "hf" in told["extras"]


def test_images_and_tuned_settings_are_told_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were tables alone."""
    one = prune.OwnImage(
        **{"id": "sha256:ab", "names": ("megatron:cpu",), "row": "cpu", "release": "0.16.1"},
        **{"created": "", "named": "", "layers": (), "added": (5,), "size": 9},
        **{"pinned": True, "used": False},
    )
    monkeypatch.setattr(prune, "ours", lambda client: [one])
    monkeypatch.setattr("launcher.images.engine.connect.connect", lambda: None)
    assert cli.main(["image", "ls", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["names"] == ["megatron:cpu"]
    best = Measurement(Setting((("training.micro_batch_size", 4),)), 12.5)
    tune._print(argparse.Namespace(json=True), [best], best, ["text"], "mine-tuned.yaml")
    told = json.loads(capsys.readouterr().out)
    assert told["best"] == {"training.micro_batch_size": 4}
    assert (told["tried"][0]["ms"], told["written"]) == (12.5, "mine-tuned.yaml")


def test_fish_has_the_same_commands_and_values(tmp_path: Path) -> None:
    """There was none for fish."""
    text = completion.script("fish")
    for word in [*cli.COMMANDS, "24.10", "gpt2-tiny.yaml", "docker"]:
        assert word in text
    assert '-ka "(_launcher_config_files)"' in text
    script = tmp_path / "launcher.fish"
    script.write_text(text, encoding="utf-8")
    try:
        ask = f"source {script}; complete -C 'launcher run gpt2-'"
        done = subprocess.run(
            ["fish", "--no-config", "-c", ask], capture_output=True, text=True, check=True
        )
    except FileNotFoundError:
        pytest.skip("no fish here")
    assert "gpt2-tiny.yaml" in done.stdout.split()
