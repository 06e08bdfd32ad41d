"""`launcher data`, as a user runs it: text in, data files out, and what is told of faults."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.base.settings import ROOT
from tests.e2e.command import launcher, refused
from tests.tools.conftest import Here
from tests.tools.data.conftest import documents, write_jsonl

TOKENIZE = [sys.executable, "-m", "launcher", "data", "tokenize"]
TEXTS = ["Hello world", "你好，世界", "", "<|endoftext|>"]
TOKENS = [
    [[15496, 995, 50256]],
    [[19526, 254, 25001, 121, 171, 120, 234, 10310, 244, 45911, 234, 50256]],
    [],
    [[27, 91, 437, 1659, 5239, 91, 29, 50256]],
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", TEXTS)


def test_from_text_to_files_that_are_looked_into(corpus: Path, tmp_path: Path) -> None:
    prefix = str(tmp_path / "c")
    options = ["--output-prefix", prefix, "--append-eod"]
    done = launcher("data", "tokenize", str(corpus), *options)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stderr.splitlines()[-1])
    assert (said["state"], said["documents"], said["tokens"], said["empty"]) == ("done", 4, 23, 1)
    assert said["files"] == [f"{prefix}_text_document.bin"]
    assert documents(Path(f"{prefix}_text_document")) == TOKENS
    shown = launcher("data", "inspect", f"{prefix}_text_document")
    assert shown.returncode == 0, shown.stderr
    assert "documents  4, 1 empty\nsequences  3\ntokens     23 of 2 bytes" in shown.stdout
    assert "document 0:\nHello world<|endoftext|>" in shown.stdout
    assert "document 1:\n你好，世界<|endoftext|>" in shown.stdout


def test_shards_are_merged_and_compared(corpus: Path, tmp_path: Path, here: Here) -> None:
    """And which release's rule made the tokens is told of all of them."""
    command = ["data", "tokenize", str(corpus), "--append-eod", "--megatron", "0.16.1"]
    command += ["--output-prefix"]
    assert here(*command, str(tmp_path / "whole")).returncode == 0
    for part in (1, 2):
        done = here(*command, str(tmp_path / "c"), "--shard", f"{part}/2")
        assert done.returncode == 0, done.stderr
    shards = [str(path) for path in sorted(tmp_path.glob("c.*-of-2_text_document.idx"))]
    joined = str(tmp_path / "joined")
    refused(here("data", "merge", shards[1], "--output-prefix", joined), 2, "of 2 shards")
    assert here("data", "merge", *shards, "--output-prefix", joined).returncode == 0
    whole = str(tmp_path / "whole_text_document")
    same = here("data", "inspect", joined, "--compare", whole)
    assert (same.returncode, same.stdout) == (0, "the same bytes\n")
    shown = here("data", "inspect", joined)
    assert "tokenizer  GPT2BPETokenizer, by the rule of Megatron 0.16.1\n" in shown.stdout
    unlike = here("data", "inspect", shards[0], "--compare", whole)
    assert (unlike.returncode, unlike.stdout[:20]) == (1, "they differ in docum")


def test_a_bad_line_is_refused_or_left_out(corpus: Path, tmp_path: Path, here: Here) -> None:
    with corpus.open("a") as file:
        file.write('{"txt": 1}\n')
    command = ["data", "tokenize", str(corpus), "--output-prefix", str(tmp_path / "c")]
    refused(here(*command), 1, "in.jsonl:5: no key 'text'; its keys: 'txt'", "--on-error skip")
    assert os.listdir(tmp_path) == ["in.jsonl"]
    done = here(*command, "--on-error", "skip")
    assert json.loads(done.stderr.splitlines()[-1])["rejected"] == 1
    assert json.loads((tmp_path / "c.rejects.jsonl").read_text())["line"] == 5
    refused(here(*command, "--on-error", "skip", "--max-errors", "0"), 1, "more than 0 such")


@pytest.mark.parametrize("shell", ["gzip -c {0} | {1} -", "exec {1} {0} 2>&-"])
def test_packed_standard_input_or_no_standard_error(
    corpus: Path, tmp_path: Path, shell: str
) -> None:
    words = shlex.join([*TOKENIZE, "--append-eod", "--output-prefix", str(tmp_path / "c")])
    subprocess.run(["sh", "-c", shell.format(corpus, words)], cwd=ROOT, check=True)
    assert documents(tmp_path / "c_text_document") == TOKENS


def test_standard_input_is_no_output(corpus: Path, tmp_path: Path) -> None:
    left = corpus.rename(tmp_path / "out.jsonl")
    with left.open() as given:
        done = subprocess.run(
            [*TOKENIZE[:-1], "convert", "-", "-o", str(tmp_path / "out.jsonl")],
            cwd=ROOT,
            stdin=given,
            capture_output=True,
            text=True,
        )
    refused(done, 2, "standard input: it would be written while it is read")
    assert len(left.read_text().splitlines()) == len(TEXTS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--shard", "0/4"], "--shard 0/4: no part"),
        (["--shard", "half"], "--shard half: no part"),
        (["--workers", "0"], "--workers 0: at least one is needed"),
        (["--max-errors", "3"], "--max-errors without --on-error skip"),
        (["--max-errors", "-1", "--on-error", "skip"], "--max-errors -1: fewer than none"),
        (["--max-record", "1"], "--max-record 1: at least 2 are read at a time"),
        (["--csv-delimiter", "||"], "not one character"),
        (["--output-prefix", ""], "--output '': no name of a file"),
        (["--output-prefix", "out/"], "no name of a file\n  --output out/corpus"),
        (["--json-keys", "a", "a"], "a key twice"),
        (["--json-keys", "a", "\udcff"], r"--json-keys '\udcff': not UTF-8"),
        (["--vocab-file", "v.json"], "one of --vocab-file and --merge-file is missing"),
        (["--tokenizer-type", "Llama2Tokenizer"], "--tokenizer-model tokenizer.model"),
        (["--tokenizer-type", "TikTokenizer", "--tokenizer-model", "x"], "x: no such file"),
    ],
)
def test_a_mistake_is_told(
    corpus: Path, tmp_path: Path, options: list[str], said: str, here: Here
) -> None:
    command = ["data", "tokenize", str(corpus), "--output-prefix", str(tmp_path / "c")]
    refused(here(*command, *options), 2, said)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_upstreams_options_are_taken(corpus: Path, tmp_path: Path, here: Here) -> None:
    """Inputs in their order, and options that change nothing here."""
    second = tmp_path / "b.jsonl"
    second.write_text('{"text": "Hello world"}\n')
    options = ["--append-eod", "--log-interval", "9", "--partitions", "2", "--workers", "2"]
    done = here(
        *("data", "tokenize", "--input", str(second), str(corpus), "--input", str(second)),
        *("--output-prefix", str(tmp_path / "c"), "--keep-sequential-samples", *options),
    )
    assert done.returncode == 0, done.stderr
    assert documents(tmp_path / "c_text_document") == [TOKENS[0], *TOKENS, TOKENS[0]]
    said = json.loads(done.stderr.splitlines()[-1])
    assert said["documents_per_s"] == pytest.approx(6 / said["seconds"], rel=0.1)


def test_tables_and_text_become_jsonl(tmp_path: Path, here: Here) -> None:
    (tmp_path / "a.csv").write_text('id,content\n1,"one, two"\n2,三\n')
    (tmp_path / "b.csv").write_text("content\nfour\n")
    target = tmp_path / "out.jsonl"
    command = ["data", "convert", str(tmp_path / "*.csv"), "--json-keys", "content", "-o"]
    assert here(*command, str(target)).returncode == 0
    lines = [json.loads(line) for line in target.read_text("utf-8").splitlines()]
    assert lines == [{"content": "one, two"}, {"content": "三"}, {"content": "four"}]
    for no_file in ("-", "", str(tmp_path) + "/"):
        refused(here(*command, no_file), 2, "no name of a file")
    refused(here(*command, "/dev/null"), 2, "/dev/null: it isn't a file")
    (tmp_path / "b.csv").write_text("content\na,b\n")
    refused(here(*command, str(target)), 1, "b.csv:2: 2 fields, and there are 1 columns")
    assert len(target.read_text("utf-8").splitlines()) == 3


def test_the_vocabulary_is_explained(here: Here) -> None:
    shown = here("data", "vocab")
    assert "GPT-2's genuine vocabulary\n50257 tokens, 50000 merges" in shown.stdout
    assert "    256  Ġt                   ' t'\n" in shown.stdout
    assert "vocab.json isn't garbled" in shown.stdout
    tokens = here("data", "vocab", "Hello world")
    assert tokens.stdout == "  15496  'Hello'\n    995  ' world'\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--from", "-5"], "--from -5: tokens are counted from 0"),
        (["--count", "-1"], "--count -1: tokens are counted from 0"),
        (["a", "\udcff"], r"'\udcff': not UTF-8"),
        (["--tokenizer-model", "tokenizer.json"], "GPT2BPETokenizer doesn't read it"),
        (["--vocab-file", "~nobody-/v", "--merge-file", "~nobody-/m"], "~nobody-/v: No such file"),
    ],
)
def test_a_mistake_about_a_vocabulary_is_told(arguments: list[str], said: str, here: Here) -> None:
    refused(here("data", "vocab", *arguments), 2, said)


def test_an_output_that_is_ascii_is_written_all_the_same(
    corpus: Path, tmp_path: Path, here: Here
) -> None:
    prefix = str(tmp_path / "c")
    assert here("data", "tokenize", str(corpus), "--output-prefix", prefix).returncode == 0
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    shown = launcher("data", "inspect", f"{prefix}_text_document", **ascii_only)
    assert shown.returncode == 0, shown.stderr
    assert "+ ##########" in shown.stdout
    assert r"document 1:" + "\n" + r"\u4f60\u597d\uff0c\u4e16\u754c" in shown.stdout
    assert r"  \u0120t              " in launcher("data", "vocab", **ascii_only).stdout
    refused(here("data", "inspect", "~nobody-/c"), 2, "~nobody-/c.idx: no such file")


def test_a_terminal_has_a_bar(corpus: Path, tmp_path: Path) -> None:
    """A megabyte or more takes longer than the time between two drawings."""
    corpus.write_bytes(corpus.read_bytes() * 60_000)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*TOKENIZE, str(corpus), "--output-prefix", str(tmp_path / "c"), "--workers", "1"],
        cwd=ROOT,
        stderr=theirs,
    )
    os.close(theirs)
    said = b""
    while piece := _read(ours):
        said += piece
    os.close(ours)
    assert process.wait() == 0
    text = said.decode()
    assert "░" in text
    assert "left" in text
    assert "240,000 documents" in text.splitlines()[-3]
    assert "60,000 of them have no tokens" in text


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
