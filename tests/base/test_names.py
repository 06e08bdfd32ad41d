"""Names, and what people see on a terminal."""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base import names
from launcher.base.screen import Progress, bare, guarded, printable
from launcher.base.settings import ROOT
from launcher.cli import main
from launcher.cli.command import table
from launcher.runs.records import record
from launcher.runs.records.record import Record

IMAGES = "-v/:/host --privileged a/../b ../a /a a/ A a: a:-1 a@sha256:0 a/-v -a.b/c a..b ü a?b a#b"
ADDRESSES = """\
-u fd::17 a::b x@y::b ssh://-oProxyCommand=x/a ssh://a@-b/c -a@b:c a@b:-c /srv/a a/b https://a/-b
https:///a ssh://u:p@h/a file://host/a file:///-a javascript:a"""
DIGEST = f"sha256:{'0a' * 32}"


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        (names.image, "cpu megatron:24.10-0.9.0 nvcr.io/nvidia/pytorch:24.10-py3 [::1]:5000/a"),
        (names.image, f"localhost:5000/a/b__c/d-e.f:T_1 a:1@{DIGEST} {DIGEST} 0a1b2c3d4e5f"),
        (names.image, f"quay.io/pypa/manylinux_2_28_x86_64@{DIGEST}"),
        (names.git_url, "https://github.com/NVIDIA/Megatron-LM.git git@git.example:a/b.git"),
        (names.git_url, "https://me:p%40ss@git.example:8443/~me/a.git file:///srv/git/a%20b.git"),
        (names.git_url, "ssh://git@git.example:22/a/b.git"),
        (names.git_mirror, "https://git.example git@git.example: file:///srv/"),
        (names.git_ref, "core_r0.9.0 feature/a+b"),
        (names.folder, "3rdparty/cudnn-frontend .github/0.9.0"),
        (names.tag, "24.10"),
        (names.index, "https://me:pw@pip.example:1/simple?a=b /srv/wheels"),
    ],
)
def test_a_name_is_taken(check: names.Check, texts: str) -> None:
    assert [check(text) for text in texts.split()] == texts.split()


@pytest.mark.parametrize(
    ("check", "texts"),
    [
        (names.image, ["", "a b", "a\n", "a:1\n", *IMAGES.split()]),
        (
            names.git_url,
            ["", "a b", "https://a/b\n", "https://a b/c", "https://a/b c", "ext::sh -c x"],
        ),
        (names.git_url, ["--upload-pack=touch x", *ADDRESSES.split()]),
        (names.git_mirror, ["", "-a", "ext::sh -c x ", "--upload-pack=x", "git.example", "a b/"]),
        (
            names.git_ref,
            ["", "-f", "--x", "a..b", "a//b", "a.lock", "a.lock/b", "a/", "a.", "/a", "a b", "a:b"],
        ),
        (
            names.folder,
            ["", "/a", "a/", "../a", "a/../b", "a/..", ".", "./a", "-a", "a/-b", "a//b"],
        ),
        (names.tag, ["", "-a", "../a", "a/b", ".a", "a b", "a\n", "a" * 101, "ä"]),
        (
            names.index,
            ["", "-i", "--x", "pip.example", "https://a b", "https://a\nb", "git+ssh://a"],
        ),
    ],
)
def test_another_text_is_refused(check: names.Check, texts: list[str]) -> None:
    """A dash makes an option of a name, `ext::` runs a command, `..` leads out of a folder."""
    for text in texts:
        with pytest.raises(ValueError, match="doesn't look like"):
            check(text)


def test_a_wrong_argument_names_its_option_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", type=names.argument(names.image_for_tag))
    assert parser.parse_args(["--base=a.b/c:{tag}"]).base == "a.b/c:{tag}"
    with pytest.raises(SystemExit):
        parser.parse_args(["--base=-v\x1b"])
    told = "argument --base: '-v\\x1b' doesn't look like an image's name"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("check", [names.image, names.git_url, names.git_ref, names.folder])
def test_a_long_text_is_told_at_once(check: names.Check) -> None:
    """A pattern that goes back and forth takes hours for such a text."""
    for text in ("a" * 50_000, "a-" * 25_000, "a/" * 25_000, "https://" + "a." * 25_000 + " "):
        try:
            check(text)
        except ValueError:
            continue


EVIL = "\x1b]0;owned\x07\x9b2J\r\u202eatad\u2066\ud800\x00"
SHOWN = r"\x1b]0;owned\x07\x9b2J\r\u202eatad\u2066\ud800\x00"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run that somebody named so, and whose program has coloured its log."""
    monkeypatch.setenv("LAUNCHER_RUNS", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere.sock")
    created, name = "2026-01-31T00:00:00+00:00", f"{EVIL}\nlauncher: forged"
    record.write(Record("aa000000", name, created, "docker", "/", "a.yaml", {}, (), 1))
    (tmp_path / "aa000000" / record.LOG).write_bytes(b"\x1b[31mloss\r\n\xff")
    return "aa000000"


def test_what_is_no_character_to_be_seen_is_written_out_as_repr_does() -> None:
    assert printable(EVIL) == SHOWN
    assert printable("naïve 你好 \\ '\"") == "naïve 你好 \\ '\""
    assert printable("a\n\tb") == r"a\n\tb"
    assert printable("a\n\tb\r", kept="\n\t") == "a\n\tb\\r"


def test_all_that_is_printed_is_printable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = sys.stdout
    with guarded():
        print(EVIL)
        print("a", f"b{EVIL}", sep="\n", end="", file=sys.stderr)
        print("\x1b[1m", file=bare(sys.stdout), end="")
    assert sys.stdout is outside
    told = capsys.readouterr()
    assert (told.out, told.err) == (f"{SHOWN}\n\x1b[1m", f"a\nb{SHOWN}")


def test_a_stream_that_was_closed_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with guarded():
        print(EVIL)


def test_steps_notes_and_cells_are_printable() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    progress.step(f"pull {EVIL}")
    progress.note(f"{EVIL}\nnext")
    progress.fail()
    assert stream.getvalue() == f"{SHOWN}\nnext\npull {SHOWN}: failed\n"
    stream.truncate(stream.seek(0))
    progress.live = True
    progress.show(EVIL[:5])
    assert stream.getvalue() == "\r\x1b[K\\x1b]0;o"
    stream.truncate(stream.seek(0))
    progress.step("build 1/2")
    progress.output("compiling")
    progress.close()
    assert "build 1/2 · compiling" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1
    assert table([("A", "B"), ("1\n2", EVIL)]) == f"A     B\n1\\n2  {SHOWN}\n"


def test_a_run_s_name_is_one_cell_of_a_table(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`runs` and `ps` printed names, of records and of containers' labels, as they are."""
    main(["runs"])
    _, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{run}  {SHOWN}\\nlauncher: forged")


def test_a_program_s_own_output_is_untouched(
    run: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    main(["logs", run])
    assert capfdbinary.readouterr().out == b"\x1b[31mloss\r\n\xff"


def test_an_error_is_printable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "inspect", str(tmp_path / EVIL[:10])]) == 2
    told = capsys.readouterr().err
    assert SHOWN[:13] in told
    assert "\x1b" not in told


def test_a_bad_record_is_shown_and_commands_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "in.jsonl"
    corpus.write_text('{"text": "\x1b]0;owned\x07\u202e\x9b2J}\n', encoding="utf-8")
    assert main(["data", "tokenize", str(corpus), "--output-prefix", str(tmp_path / "c")]) == 1
    told = capsys.readouterr().err
    assert r"""  | {"text": "\x1b]0;owned\x07\u202e\x9b2J}""" in told
    assert "\x1b" not in told


@pytest.mark.parametrize("arguments", [["image", "pull", "--help"], ["data", "inspect", "…"]])
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_output_that_cannot_encode_is_no_error(encoding: str, arguments: list[str]) -> None:
    """It was a UnicodeEncodeError."""
    done = subprocess.run(
        [sys.executable, "-m", "launcher", *arguments],
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert r"\u2026" in done.stdout + done.stderr
    assert "nobody foresaw" not in done.stderr
    assert done.returncode in (0, 2)
