"""vocab.json and merges.txt: the genuine ones, and what is told of others."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import cli
from launcher.data import tokenizers, vocabulary
from launcher.data.tokenizers import Chosen, Tokenizer
from launcher.errors import UsageError

ALPHABET = vocabulary.alphabet()


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A vocabulary of the bytes, two merges and the end of a document."""
    tokens = [*ALPHABET.values(), "ab", "abc", vocabulary.END]
    (tmp_path / "vocab.json").write_text(json.dumps({t: n for n, t in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nab c\n")
    return tmp_path / "vocab.json", tmp_path / "merges.txt"


@given(st.text(max_size=80))
def test_decoding_gives_the_text(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode([text])[0].tolist()) == text


def test_another_vocabulary_is_used_as_it_is(small: tuple[Path, Path]) -> None:
    found = tokenizers.load_tokenizer(Chosen(vocab_file=small[0], merge_file=small[1]))
    assert (found.size, found.end) == (259, 258)
    assert found.encode(["abcab abd"])[0].tolist() == [257, 256, 220 + 0, 256, 67]  # space: Ġ
    assert not vocabulary.load_vocabulary(*small).genuine
    special = ["<s>", "[PAD]", "<｜end｜>", "  ", *(f"<extra_{n}>" for n in range(200))]
    ids = json.loads(small[0].read_text())  # special tokens need no merge
    small[0].write_text(json.dumps(ids | {t: n for n, t in enumerate(special, len(ids))}))
    assert len(vocabulary.load_vocabulary(*small).ids) == 259 + 204


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("vocab.json", "{", "not JSON"),
        ("vocab.json", '["a"]', "not an object of tokens"),
        ("vocab.json", '{"a": 0, "b": 2}', "aren't those from 0 to 1"),
        ("vocab.json", r'{"\ud800": 0}', "not JSON: no low surrogate"),
        ("vocab.json", '{"a": 0, "b": 1}', "no <|endoftext|>"),
        ("merges.txt", "#version: 0.2\na b\nab c", "its last line has no end"),
        ("merges.txt", "#version: 0.2\na b\nabc\n", "merges.txt:3: 'abc': a merge is two tokens"),
        ("merges.txt", "#version: 0.2\na b\na b\n", "a merge is in it twice"),
        (
            "merges.txt",
            "#version: 0.2\nab c\na b\n",
            "merges.txt:2: 'ab' is no byte, and no earlier merge",
        ),
        (
            "merges.txt",
            "#version: 0.2\na b\nab €\n",
            "merges.txt:3: '€' is no byte, and no earlier merge",
        ),
        ("merges.txt", "#version: 0.2\na b\nb c\n", "without 1 tokens that merges.txt makes: bc"),
    ],
)
def test_files_that_are_no_vocabulary_are_told(
    small: tuple[Path, Path], file: str, content: str, said: str
) -> None:
    small[0].with_name(file).write_text(content)
    with pytest.raises(UsageError) as caught:
        vocabulary.load_vocabulary(*small)
    assert said in str(caught.value)
    assert file in str(caught.value)


@pytest.mark.parametrize("merges", [-1, 0, 1000, 30_000, 49_000])
def test_a_part_of_the_merges_is_told(tmp_path: Path, merges: int) -> None:
    """Even one that ends where a line does; -1 is an empty file."""
    vocab, whole = vocabulary.vocabulary_files(None, None)
    part = tmp_path / "merges.txt"
    part.write_text("".join(whole.read_text().splitlines(keepends=True)[: merges + 1]))
    with pytest.raises(UsageError) as caught:
        vocabulary.load_vocabulary(vocab, part)
    assert f"{part}: no merge makes " in str(caught.value)
    assert "Is it a complete copy?" in str(caught.value)


def test_with_gpt2s_own_tokens_no_merge_may_be_missing_or_elsewhere(tmp_path: Path) -> None:
    vocab, whole = vocabulary.vocabulary_files(None, None)
    merges, lines = tmp_path / "merges.txt", whole.read_text().splitlines()
    for bad in (lines[:-1], [*lines[:-2], lines[-1], lines[-2]]):
        merges.write_text("".join(f"{line}\n" for line in bad))
        with pytest.raises(UsageError, match=r"not the merges of .*, which is GPT-2's own: "):
            vocabulary.load_vocabulary(vocab, merges)
    merges.write_bytes("".join(f"{line}\r\n" for line in lines).encode())
    assert len(vocabulary.load_vocabulary(vocab, merges).merges) == 50_000


def test_files_are_read_once(small: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A shell's <(…) can't be read again."""
    vocab, merge = (path.read_bytes() for path in small)
    with piped(vocab) as vocab_file, piped(merge) as merge_file:
        assert (
            tokenizers.load_tokenizer(Chosen(vocab_file=vocab_file, merge_file=merge_file)).size
            == 259
        )
    with piped(vocab) as vocab_file, piped(merge) as merge_file:
        options = ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
        assert cli.main(["data", "vocab", *options]) == 0
    shown = capsys.readouterr().out
    for content in (vocab, merge):
        assert f"sha256 {hashlib.sha256(content).hexdigest()}\n" in shown


@contextmanager
def piped(content: bytes) -> Iterator[Path]:
    """The name of a pipe that holds a short content."""
    read, write = os.pipe()
    with open(read, "rb"):
        with open(write, "wb") as file:
            file.write(content)
        yield Path(f"/dev/fd/{read}")


def test_one_file_alone_and_a_package_that_was_changed_are_told(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="one of --vocab-file and --merge-file is missing"):
        vocabulary.vocabulary_files(small[0], None)
    with pytest.raises(UsageError, match=r"absent: No such file"):
        vocabulary.load_vocabulary(small[0], small[0].with_name("absent"))
    monkeypatch.setitem(vocabulary.PACKAGED, "vocab.json", "__init__.py")
    with pytest.raises(UsageError, match=r"not GPT-2's vocab\.json, whose sha256 is 196139"):
        vocabulary.vocabulary_files(None, None)
