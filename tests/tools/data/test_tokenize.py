"""Jobs, from a file to .bin and .idx: what is in them, and that nothing is lost in silence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from launcher import cli
from launcher.base import files
from launcher.base.errors import UsageError
from launcher.base.settings import ROOT
from launcher.base.unpack import packing
from launcher.tools.data import kinds, sources, tokenize
from launcher.tools.data.faults import DataError
from launcher.tools.data.jsonl import convert
from launcher.tools.data.ledger import JobState, Leniency
from launcher.tools.data.sources import ReadingOptions
from launcher.tools.data.tokenize import TokenizeTask
from launcher.tools.data.tokenizers import Tokenizer, TokenizerChoice
from tests.disks import limited
from tests.e2e.site import until
from tests.tools.data.conftest import documents, write_jsonl

END = 50256
SKIP = Leniency(skip=True)

pytestmark = pytest.mark.usefixtures("loaded")


def job(
    *inputs: Path | str, to: Path, keys: Sequence[str] = ("text",), **more: object
) -> TokenizeTask:
    reading = ReadingOptions(keys=tuple(keys), **more.pop("reading", {}))
    return TokenizeTask(
        tuple(map(str, inputs)), to, reading, TokenizerChoice(), append_eod=True, **more
    )


def run(job: TokenizeTask) -> JobState:
    return tokenize.run(job, lambda done: None)


def encoded(gpt2: Tokenizer, value: str | list[str]) -> list[list[int]]:
    """A document by upstream's rules, one text at a time."""
    texts = value if isinstance(value, list) else [value]
    found = [tokens.tolist() for tokens in gpt2.encode(texts) if len(tokens)]
    if found:
        found[-1].append(END)
    return found


def expected(content: bytes) -> tuple[list[str | list[str]], list[int]]:
    """The documents and the bad lines of a file, as Python reads it and nothing quick."""
    lines = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    good: list[str | list[str]] = []
    bad: list[int] = []
    for number, line in enumerate(lines, 1):
        try:
            if not line.strip(b" \t\r\n"):
                continue
            text = json.loads(line.decode())["text"]
            texts = text if isinstance(text, list) else [text]
            assert all(isinstance(one, str) and one.encode() is not None for one in texts)
            good.append(text)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            bad.append(number)
    return good, bad


TEXTS = st.text(max_size=30) | st.sampled_from(["", " ", "Hello world", "<|endoftext|>", "中文"])
VALUES = TEXTS | st.lists(TEXTS, max_size=3)
GOOD = st.builds(
    lambda value, plain: json.dumps({"text": value}, ensure_ascii=plain).encode("utf-8"),
    VALUES,
    st.booleans(),
)
BAD = st.sampled_from(
    [
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"17",
        b'{"tex": "a"}',
        b'{"text": null}',
        b'{"text": 3}',
        b'{"text": {}}',
        b'{"text": ["a", 1]}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a"} {"text": "b"}',
        b'{"text": "a"',
        b'{"text": "\x01"}',
        b"\xef\xbb\xbf ",
        b"[" * 3000,
    ]
)
BLANK = st.sampled_from([b"", b" ", b"\t"])
LINES = st.lists(GOOD | GOOD | BAD | BLANK, max_size=12)
EDITS = st.lists(
    st.tuples(st.integers(0, 400), st.binary(max_size=4), st.integers(0, 4)), max_size=3
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=LINES, end=st.sampled_from([b"\n", b"\r\n", b"\r"]), edits=EDITS, last=st.booleans())
@example(lines=[b'{"text": "a"}', b"{"], end=b"\n", edits=[], last=False)
def test_no_document_is_lost_in_silence(
    tmp_path_factory: pytest.TempPathFactory,
    gpt2: Tokenizer,
    lines: list[bytes],
    end: bytes,
    edits: list[tuple[int, bytes, int]],
    last: bool,
) -> None:
    """A bad line ends the job with its number and nothing written; or is listed, and only it."""
    content = end.join(lines) + (end if last else b"")
    for at, put, cut in edits:
        content = content[:at] + put + content[at + cut :]
    folder = tmp_path_factory.mktemp("data")
    source = folder / "in.jsonl"
    source.write_bytes(content)
    assume(packing(content[:8]) is None and not kinds.is_array(content[: kinds.BEGINNING]))
    good, bad = expected(content.removeprefix(b"\xef\xbb\xbf"))
    wanted = [encoded(gpt2, value) for value in good]
    if bad:
        with pytest.raises(DataError, match=rf"in\.jsonl:{bad[0]}: ") as caught:
            run(job(source, to=folder / "out"))
        assert caught.value.exit_code == 1
        assert os.listdir(folder) == ["in.jsonl"]
    done = run(job(source, to=folder / "out", leniency=SKIP))
    assert documents(folder / "out_text_document") == wanted
    assert (done.documents, done.rejected) == (len(good), len(bad))
    listed = folder / "out.rejects.jsonl"
    found = [json.loads(line) for line in listed.read_text("utf-8").split("\n")[:-1]] if bad else []
    assert [record["line"] for record in found] == bad
    names = {"in.jsonl", *(f"out_text_document.{end}" for end in ("bin", "idx", "made.json"))}
    assert {*os.listdir(folder)} == names | ({"out.rejects.jsonl"} if bad else set())


def test_documents_with_a_bad_key_are_left_out_of_all(tmp_path: Path, gpt2: Tokenizer) -> None:
    """Every key has its index, and document n of one belongs to document n of the other."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"a": "1", "b": "2"}\n{"a": "3", "b": 4}\n{"a": "", "b": "6"}\n')
    run(job(source, to=tmp_path / "out", keys=("a", "b"), leniency=SKIP))
    assert documents(tmp_path / "out_a_document") == [encoded(gpt2, "1"), []]
    assert documents(tmp_path / "out_b_document") == [encoded(gpt2, "2"), encoded(gpt2, "6")]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "not JSON: Expecting property name enclosed in double quotes at column 2"),
        ('{"content": "a", "id": 1}', "no key 'text'; its keys: 'content', 'id'"),
        ("[1]", "a list, where an object with text is wanted"),
        ('{"text": null}', "'text' is null, where a text is wanted"),
        ('{"text": ["a", 2]}', "an item of 'text' is a number, where a text is wanted"),
        (r'{"text": "\ud83d"}', "'text' has half of a surrogate pair, U+D83D"),
        ('{"text": "a\udcff"}', "not UTF-8: byte 0xff at 11"),
    ],
)
def test_a_bad_line_is_told(tmp_path: Path, line: str, said: str) -> None:
    content = f'{{"text": "a"}}\n\n{line}\n'.encode(errors="surrogateescape")
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(DataError) as caught:
        run(job(tmp_path / "in.jsonl", to=tmp_path / "out"))
    shown = line.replace("\udcff", r"\xff")
    assert f"{tmp_path}/in.jsonl:3: {said}\n  | {shown}\n" in str(caught.value)
    assert "--on-error skip" in caught.value.remedy


def standard_input(content: bytes, folder: Path, patch: pytest.MonkeyPatch) -> str:
    ours, theirs = os.pipe()
    os.write(theirs, content)
    os.close(theirs)
    patch.setattr(sys, "stdin", open(ours, encoding="utf-8"))  # noqa: SIM115
    return "-"


def fifo(content: bytes, folder: Path, patch: pytest.MonkeyPatch) -> str:
    os.mkfifo(folder / "fifo")
    threading.Thread(target=(folder / "fifo").write_bytes, args=(content,), daemon=True).start()
    return str(folder / "fifo")


@pytest.mark.parametrize("kind", ["jsonl", "txt"])
@pytest.mark.parametrize("pipe", [standard_input, fifo])
def test_a_bad_line_of_a_pipe_is_told(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    pipe: Callable[[bytes, Path, pytest.MonkeyPatch], str],
) -> None:
    """It can be read once only."""
    content = b'{"text": "a"}\n\n"\xff"\n'
    for leniency in (Leniency(), SKIP):
        folder = tmp_path_factory.mktemp("data")
        name, reading = pipe(content, folder, monkeypatch), {"format": kind}
        asked = job(name, to=folder / "out", leniency=leniency, reading=reading)
        told = "standard input" if name == "-" else name
        if leniency.skip:
            assert run(asked).documents == 1
            listed = json.loads((folder / "out.rejects.jsonl").read_text("utf-8"))
            assert (listed["file"], listed["line"]) == (told, 3)
        else:
            with pytest.raises(DataError, match=rf"{told}:3: not UTF-8: byte 0xff"):
                run(asked)


def test_no_more_than_the_allowed_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{\n{\n{\n')
    two = Leniency(skip=True, most=2)
    with pytest.raises(DataError, match=r"in\.jsonl:4: .*\n  more than 2 such"):
        run(job(tmp_path / "in.jsonl", to=tmp_path / "out", leniency=two))
    assert os.listdir(tmp_path) == ["in.jsonl"]
    done = run(job(tmp_path / "in.jsonl", to=tmp_path / "out", leniency=replace(two, most=3)))
    assert (done.documents, done.rejected) == (1, 3)
    assert (tmp_path / "out.rejects.jsonl").exists()
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')  # a clean job removes an older list
    run(job(tmp_path / "in.jsonl", to=tmp_path / "out", leniency=SKIP))
    assert not (tmp_path / "out.rejects.jsonl").exists()


def test_jobs_of_other_keys_dont_write_one_list(tmp_path: Path) -> None:
    """What a killed job left of it goes; a job that leaves nothing out needs none."""
    source = tmp_path / "in.jsonl"
    source.write_text('{"a": "1", "b": "2"}\n')
    files.aside_path(tmp_path / "out.rejects.jsonl", "0" * 16).write_text("left")

    def second(done: JobState) -> None:
        with pytest.raises(UsageError, match=r"out\.rejects\.jsonl: another job writes"):
            run(job(source, to=tmp_path / "out", keys=("b",), leniency=SKIP))
        run(job(source, to=tmp_path / "out", keys=("b",)))

    first = job(source, to=tmp_path / "out", keys=("a",), leniency=SKIP)
    assert tokenize.run(first, second).documents == 1
    assert len(documents(tmp_path / "out_b_document")) == 1
    assert not [*tmp_path.glob("*.rejects.jsonl*"), *tmp_path.glob(".*")]


def test_what_cant_be_written_is_named_and_keeps_the_rest_away(tmp_path: Path) -> None:
    """Even a list so short that it is written in the end, after all else."""
    source = write_jsonl(tmp_path / "in.jsonl", ["text"] * 20)
    with source.open("a") as file:
        file.write("{\n" * 20)
    to = job(source, to=tmp_path / "out", leniency=SKIP)
    for work in (
        lambda: run(to),
        lambda: convert([str(source)], tmp_path / "out", to.reading, SKIP, lambda done: None),
    ):
        with limited(100), pytest.raises(UsageError, match="too large\n  Nothing was wr") as e:
            work()
        assert f"{tmp_path}/out" in e.value.problem
        assert "ulimit -f unlimited" in e.value.remedy
    with limited(1000), pytest.raises(UsageError, match="too large"):
        run(to)
    assert os.listdir(tmp_path) == ["in.jsonl"]
    run(to)
    assert 1000 < (tmp_path / "out.rejects.jsonl").stat().st_size < 8000


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_order_is_the_inputs(
    tmp_path: Path, gpt2: Tokenizer, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """Blocks of a few lines, of several files, by any number of workers."""
    monkeypatch.setattr(sources, "BLOCK", 256)
    texts = [f"document {number} " + "word " * (number % 40) for number in range(400)]
    files = [write_jsonl(tmp_path / f"{n}.jsonl", texts[n * 100 : n * 100 + 100]) for n in range(4)]
    run(job(*files, to=tmp_path / "out", workers=workers))
    assert documents(tmp_path / "out_text_document") == [encoded(gpt2, text) for text in texts]
    with files[-1].open("a") as file:
        file.write('{"text"\n')
    with pytest.raises(DataError, match=r"3\.jsonl:101: not JSON"):
        run(job(*files, to=tmp_path / "out", workers=workers))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_folder_in_an_outputs_place_is_told_before(tmp_path: Path, suffix: str) -> None:
    """And an older file of the two stays."""
    source = write_jsonl(tmp_path / "in.jsonl", ["text"])
    run(job(source, to=tmp_path / "out"))
    (tmp_path / f"out_text_document{suffix}").unlink()
    (tmp_path / f"out_text_document{suffix}").mkdir()
    before = {*os.listdir(tmp_path)}
    with pytest.raises(UsageError, match=rf"out_text_document\{suffix}: it isn't a file"):
        tokenize.run(job(source, to=tmp_path / "out"), lambda done: pytest.fail("it was begun"))
    assert {*os.listdir(tmp_path)} == before
    with pytest.raises(UsageError, match=r"absent: no such folder\n  Make it: mkdir -p"):
        run(job(source, to=tmp_path / "absent/out"))


@pytest.mark.parametrize(
    "ended",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long), signal.SIGKILL],
)
def test_an_ended_job_leaves_no_output(tmp_path: Path, ended: signal.Signals) -> None:
    """It waits for its standard input; then the same job, run anew, is whole."""
    command = [sys.executable, "-m", "launcher", "data", "tokenize", "--workers", "2"]
    source = write_jsonl(tmp_path / "in.jsonl", ["text"] * 200_000)
    process = subprocess.Popen(
        [*command, str(source), "-", "--output-prefix", str(tmp_path / "out")],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until(lambda: any(path.stat().st_size for path in tmp_path.glob("*.bin.*.aside")))
    process.send_signal(ended)
    assert "Traceback" not in process.communicate()[1].decode()
    assert not [*tmp_path.glob("out_text_document.bin"), *tmp_path.glob("*.idx")]
    if ended == signal.SIGINT:
        assert (process.returncode, os.listdir(tmp_path)) == (130, ["in.jsonl"])
    run(job(source, to=tmp_path / "out"))
    assert len(documents(tmp_path / "out_text_document")) == 200_000
    assert not [*tmp_path.glob("*.aside")]


def test_an_input_without_documents_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file gave an empty .bin, and not a word."""
    contents = {"full.txt": "a\n", "empty.txt": "", "blank.txt": "\n \n", "head.csv": "text,id\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    inputs = [str(tmp_path / name) for name in contents]
    for command in (["tokenize", "--output-prefix"], ["convert", "-o"]):
        made = [command[0], *inputs, command[1], str(tmp_path / f"{command[0]}.out")]
        assert cli.main(["data", *made]) == 0
        *told, last = capsys.readouterr().err.splitlines()
        assert told == [f"launcher: no document in {name}" for name in inputs[1:]]
        assert json.loads(last)["without"] == inputs[1:]
