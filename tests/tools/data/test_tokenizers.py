"""Tokens by upstream's rules, of each tokenizer; and vocabularies."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import string
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import regex
import sentencepiece
import tokenizers as huggingface
from hypothesis import example, given
from hypothesis import strategies as st

from launcher import cli
from launcher.base.errors import UsageError
from launcher.images.sources.megatron_source import own_version
from launcher.tools.data import tokenize, tokenizers, vocabulary
from launcher.tools.data.faults import DataError
from launcher.tools.data.ledger import Leniency
from launcher.tools.data.prepared import prepared
from launcher.tools.data.sources import ReadingOptions
from launcher.tools.data.tokenize import TokenizeTask
from launcher.tools.data.tokenizers import Tokenizer, TokenizerChoice
from tests.tables import table
from tests.tools.data.conftest import documents

# Where GPT-2 divides a text, from its encoder.py.
PIECES = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
SCRIPTS = [
    "Hello world",
    "don't I'LL",
    "中文，日本語",
    "हिन्दी",
    "👩‍👩‍👧",
    "\u00a0\u2028\u0085 x",
    "٣²Ⅷ",
    "\x00\x1c",
]
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(SCRIPTS) | st.text(max_size=3)).map("".join)


@cache
def ranks() -> tuple[dict[str, int], dict[tuple[str, ...], int]]:
    found = vocabulary.load_vocabulary(*vocabulary.vocabulary_files(None, None))
    return found.ids, {tuple(m.split(" ")): rank for rank, m in enumerate(found.merges)}


def plainly(text: str) -> list[int]:
    """Of all neighbours the pair with the lowest rank is merged everywhere, until none is left."""
    ids, order = ranks()
    byte = vocabulary.alphabet()
    found = []
    for piece in PIECES.findall(text):
        symbols = [byte[one] for one in piece.encode()]
        while pairs := [p for p in pairwise(symbols) if p in order]:
            first, second = min(pairs, key=order.__getitem__)
            merged: list[str] = []
            for symbol in symbols:
                if merged and (merged[-1], symbol) == (first, second):
                    merged[-1] = first + second
                else:
                    merged.append(symbol)
            symbols = merged
        found += [ids[symbol] for symbol in symbols]
    return found


@given(text=TEXTS)
@example(text="a" * 300)
@example(text=" " * 300 + "x")
@example(text="<|endoftext|>")
def test_gpt2(gpt2: Tokenizer, text: str) -> None:
    tokens = gpt2.encode([text])[0].tolist()
    assert tokens == plainly(text)
    assert gpt2.decode(tokens) == text


WORDS = st.text("ab中é1!' \n", min_size=1, max_size=8).flatmap(
    lambda part: st.integers(1, 60).map(lambda times: part * times)
)


@given(text=st.lists(WORDS | st.sampled_from([*ranks()[0]]), max_size=40).map("".join))
@example(text="internationalization" * 20)
@example(text="'" * 300 + "s")
@example(text=" " * 300 + "x")
def test_a_long_text_in_pieces_has_the_same_tokens(gpt2: Tokenizer, text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizers, "PIECE", 50)
        patch.setattr(tokenizers, "LEFT", 4)
        found = gpt2.encode([text])[0].tolist()
    assert found == gpt2.encode([text])[0].tolist()


def with_merges(folder: Path, merges: list[str]) -> tuple[Path, Path]:
    """GPT-2's files, of the bytes, these merges and the end of a document."""
    made = [merge.replace(" ", "") for merge in merges]
    names = [*vocabulary.alphabet().values(), *made, vocabulary.END]
    vocab, merge = folder / "vocab.json", folder / "merges.txt"
    vocab.write_text(json.dumps({name: number for number, name in enumerate(names)}))
    merge.write_text("".join(f"{line}\n" for line in ["#version: 0.2", *merges]))
    return vocab, merge


def of_files(vocab: Path, merge: Path) -> Tokenizer:
    return tokenizers.load_tokenizer(TokenizerChoice(vocab_file=vocab, merge_file=merge))


@pytest.mark.parametrize("size", range(14, 52))
def test_a_piece_that_depends_on_its_end_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Letters are paired from the last one on."""
    letters = string.ascii_letters
    made = of_files(*with_merges(tmp_path, [" ".join(two) for two in pairwise(letters)][::-1]))
    monkeypatch.setattr(tokenizers, "PIECE", size)
    monkeypatch.setattr(tokenizers, "LEFT", 4)
    found = made.encode([letters])[0]
    assert [made.decode([one]) for one in found] == regex.findall("..", letters)


@pytest.mark.parametrize(("text", "merge"), [("??'sa", "s a"), ("b'llab", "l a")])
@pytest.mark.parametrize("before", range(30))
def test_no_piece_begins_near_a_contraction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, text: str, merge: str
) -> None:
    """In "??'sa" s and a are of one word, but not in "'sa"; l and a are in "lla", not in "'lla"."""
    made = of_files(*with_merges(tmp_path, [merge]))
    text = text[0] * before + text + "b" * 30
    whole = made.encode([text])[0].tolist()
    monkeypatch.setattr(tokenizers, "PIECE", 16)
    monkeypatch.setattr(tokenizers, "LEFT", 4)
    assert made.encode([text])[0].tolist() == whole


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of each kind, made of some text."""
    folder = tmp_path_factory.mktemp("models")
    lines = [f"{word} {number} 中文 text" for number, word in enumerate(["one", "two", "six"] * 60)]
    (folder / "lines.txt").write_text("\n".join(lines))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "lines.txt"),
        model_prefix=str(folder / "spm"),
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        minloglevel=2,
    )
    made = huggingface.Tokenizer(huggingface.models.BPE())
    made.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = huggingface.decoders.ByteLevel()
    alphabet = huggingface.pre_tokenizers.ByteLevel.alphabet()
    trainer = huggingface.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(lines, trainer)
    made.enable_truncation(3)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<end>"}}')
    tokens = [bytes([byte]) for byte in range(256)] + [b"te", b"tex", b"text"]
    (folder / "ranks.json").write_text(
        json.dumps(
            [
                {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
                for rank, token in enumerate(tokens)
            ]
        )
    )
    (folder / "gap.json").write_text(
        '[{"rank": 0, "token_bytes": "AA=="}, {"rank": 2, "token_bytes": "AQ=="}]'
    )
    (folder / "words.json").write_text('[{"rank": 0, "token_bytes": "dGU="}]')
    return folder


@pytest.mark.parametrize("text", ["one text", "", " two  spaces", "ü☃", "<s> </s> <end>"])
def test_the_others(models: Path, text: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_file=str(models / "spm.model"))
    llama = tokenizers.load_tokenizer(LLAMA(model=models / "spm.model"))
    assert llama.encode([text])[0].tolist() == [model.bos_id(), *model.encode(text)]
    plain = tokenizers.load_tokenizer(
        TokenizerChoice("GPTSentencePieceTokenizer", model=models / "spm.model")
    )
    assert plain.encode([text])[0].tolist() == model.encode(text)
    assert (llama.size, llama.end, plain.end) == (330, model.eos_id(), model.eos_id())
    own = huggingface.Tokenizer.from_file(str(models / "tokenizer.json"))
    own.no_truncation()
    made = tokenizers.load_tokenizer(HUGGING(model=models))
    assert made.encode([text])[0].tolist() == own.encode(text).ids
    assert made.end == own.token_to_id("<end>")


RELEASES = ["0.9.0", "0.14.0", "0.15.0", "0.16.1+ab", "0.17.1", "0.19.0", "0.20.0"]


@pytest.mark.parametrize("release", RELEASES)
def test_special_tokens_are_those_of_the_release(models: Path, release: str) -> None:
    """All had 0.9.0's, and a newer release's own tool wrote other tokens."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(models / "spm.model"))
    own = huggingface.Tokenizer.from_file(str(models / "tokenizer.json"))
    own.post_processor = huggingface.processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", own.token_to_id("<end>"))]
    )
    own.no_truncation()
    own.save(str(models / "begins.json"))
    text, old, between = "one text", release in RELEASES[:2], release in RELEASES[2:4]

    def encoded(kind: str, name: str, text: str, **more: object) -> list[int]:
        chosen = TokenizerChoice(kind, model=models / name, megatron=release, **more)  # type: ignore[arg-type]
        return tokenizers.load_tokenizer(chosen).encode([text])[0].tolist()

    first = [model.bos_id()] if old else []
    assert encoded("Llama2Tokenizer", "spm.model", text) == first + model.encode(text)
    assert encoded("GPTSentencePieceTokenizer", "spm.model", text) == model.encode(text)
    wanted = own.encode(text, add_special_tokens=not between).ids
    assert encoded("HuggingFaceTokenizer", "begins.json", text) == wanted
    sizes = {"vocab_size": 269, "special_tokens": 10}
    named = encoded("TikTokenizer", "ranks.json", "text</s><sep>", **sizes)
    assert (named == [268, 2, 6]) != old
    gpt2 = tokenizers.load_tokenizer(TokenizerChoice(megatron=release))
    (found,) = gpt2.encode(["<|endoftext|>Hello world<|endoftext|>"])
    assert (found.tolist() == [50256, 15496, 995, 50256]) != old


def test_ranks_come_after_special_tokens(models: Path) -> None:
    chosen = RANKS(model=models / "ranks.json", vocab_size=269, special_tokens=10)
    made = tokenizers.load_tokenizer(chosen)
    assert (made.size, made.end) == (269, 2)
    assert made.encode(["text <s>"])[0].tolist() == [268, 42, 70, 125, 72]
    assert made.decode([268]) == "text"


HUGGING = partial(TokenizerChoice, "HuggingFaceTokenizer", model=Path("tokenizer.json"))
LLAMA = partial(TokenizerChoice, "Llama2Tokenizer")
RANKS = partial(TokenizerChoice, "TikTokenizer", model=Path("ranks.json"))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (TokenizerChoice("BertTokenizer"), "--tokenizer-type BertTokenizer"),
        (HUGGING(model=Path("spm.model")), "no tokenizer.json"),
        (HUGGING(end="<x>"), "no token '<x>'"),
        (HUGGING(end="\udcff"), r"no token '\udcff'"),
        (LLAMA(model=Path("tokenizer.json")), "no SentencePiece model"),
        (LLAMA(model=Path()), ".: a folder"),
        (
            LLAMA(vocab_file=Path("v"), merge_file=Path("m")),
            "--vocab-file: Llama2Tokenizer doesn't",
        ),
        (RANKS(model=Path("tokenizer.json")), "no list of rank"),
        (RANKS(), "Say the size: --vocab-size 1259"),
        (RANKS(special_tokens=2), "at least 3, <unk>"),
        (RANKS(special_tokens=-1), "at least 3, <unk>"),
        (RANKS(vocab_size=1000), "fewer than the 1000"),
        (RANKS(model=Path("gap.json")), "aren't 0, 1, 2 and so on"),
        (RANKS(model=Path("words.json")), "aren't the bytes in their order"),
        (TokenizerChoice(model=Path("x")), "--tokenizer-model: GPT2BPETokenizer doesn't read"),
        (TokenizerChoice(vocab_size=50257), "--tokenizer-type TikTokenizer"),
        (TokenizerChoice(pattern="v2"), "--tiktoken-pattern: GPT2BPETokenizer doesn't read it"),
        (TokenizerChoice(end="</s>"), "--eod-token: GPT2BPETokenizer doesn't read it"),
        *(
            (TokenizerChoice(megatron=v), f"--megatron {v}: no release")
            for v in ("16", "new", "", "0.x")
        ),
    ],
)
def test_a_wrong_file_is_told(
    models: Path, monkeypatch: pytest.MonkeyPatch, chosen: TokenizerChoice, said: str
) -> None:
    monkeypatch.chdir(models)
    with pytest.raises(UsageError) as caught:
        tokenizers.load_tokenizer(chosen)
    assert said in str(caught.value)


@table("config", "said")
def test_a_broken_tokenizer_config_is_told(tmp_path: Path, config: str, said: str) -> None:
    chosen = huggingface_of(tmp_path, {"Hello": 0, "<end>": 1})
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(UsageError) as caught:
        tokenizers.load_tokenizer(chosen)
    assert said in str(caught.value)
    assert tokenizers.load_tokenizer(replace(chosen, end="<end>")).end == 1


def huggingface_of(folder: Path, words: dict[str, int], unknown: str = "Hello") -> TokenizerChoice:
    """A tokenizer whose tokens are words, in a folder."""
    made = huggingface.Tokenizer(huggingface.models.WordLevel(words, unknown))
    made.pre_tokenizer = huggingface.pre_tokenizers.WhitespaceSplit()
    made.save(str(folder / "tokenizer.json"))
    return TokenizerChoice("HuggingFaceTokenizer", model=folder)


def job_of(path: Path, text: str, chosen: TokenizerChoice, **reading: Any) -> TokenizeTask:
    """A job with one input."""
    path.write_text(text)
    return TokenizeTask((str(path),), path.with_name("out"), ReadingOptions(**reading), chosen)


def test_a_text_that_the_tokenizer_fails_at_is_a_bad_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A word that isn't in a vocabulary without a token for such."""
    chosen = huggingface_of(tmp_path, {"a": 0, "b": 1}, unknown="none")
    lines = ('{"x": "a", "y": "b"}', "", '{"x": "b", "y": ["a", "a c"]}', "{")
    text = "\n".join([*lines, '{"x": "b", "y": "a"}'])
    job = job_of(tmp_path / "in.jsonl", text, chosen, keys=("x", "y"))
    with pytest.raises(DataError, match=r"in\.jsonl:3: the tokenizer fails: .*UNK.*\n  \| .*a c"):
        tokenize.run(job, lambda done: None)
    done = tokenize.run(replace(job, leniency=Leniency(skip=True)), lambda done: None)
    assert (done.documents, done.blank, done.rejected) == (2, 1, 2)
    assert documents(tmp_path / "out_x_document") == [[[0]], [[1]]]
    assert documents(tmp_path / "out_y_document") == [[[1]], [[0]]]
    options = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    assert cli.main(["data", "vocab", "c", *options]) == 2
    assert "launcher: 'c': the tokenizer fails: " in capsys.readouterr().err


def test_tokens_with_a_gap_are_written_whole(tmp_path: Path) -> None:
    """Three entries, and the highest needs four bytes."""
    chosen = huggingface_of(tmp_path, {"Hello": 0, "world": 70_000, "<end>": 2})
    job = job_of(tmp_path / "in.txt", "world Hello\n", chosen)
    assert tokenizers.load_tokenizer(job.tokenizer).size == 70_001
    tokenize.run(job, lambda done: None)
    assert documents(tmp_path / "out_text_document") == [[[70_000, 0]]]


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    """What a template puts before each text has a number of its own."""
    chosen = huggingface_of(tmp_path, {"Hello": 0, "<s>": 1})
    made = json.loads((tmp_path / "tokenizer.json").read_text())
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [65_537], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(made))
    job = job_of(tmp_path / "in.txt", "Hello\n", chosen)
    with pytest.raises(DataError, match=r"token 65537, and the tokens .* from 0 to 65535"):
        tokenize.run(job, lambda done: None)
    assert not [*tmp_path.glob("out*")]


def test_another_end_of_a_document_is_another_prepared_text(tmp_path: Path) -> None:
    chosen = huggingface_of(tmp_path, {"Hello": 0, "<a>": 1, "<b>": 2})
    (tmp_path / "in.txt").write_text("Hello\n")
    found = []
    for end in ("<a>", "<b>"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end}))
        made = prepared([str(tmp_path / "in.txt")], tmp_path / "cache", ReadingOptions(), chosen, 1)
        made.make(lambda done: None)
        found.append(documents(made.prefix))
    assert found == [[[[0, 1]]], [[[0, 2]]]]


def upstreams(checkout: Path, source: Path, prefix: Path, model: Path | None = None) -> None:
    """Run upstream's program by MEGATRON_PYTHON, which has torch and regex, on GPT-2's vocabulary.

    With a SentencePiece `model`, as Llama 2's: then that Python needs sentencepiece.
    """
    program = checkout / "tools/preprocess_data.py"
    command = [os.environ.get("MEGATRON_PYTHON", "python3"), str(program), "--input", str(source)]
    command += ["--output-prefix", str(prefix), "--append-eod", "--workers", "2"]
    if model:
        command += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(model)]
    else:
        vocab_file, merge_file = vocabulary.vocabulary_files(None, None)
        command += ["--vocab-file", str(vocab_file), "--merge-file", str(merge_file)]
        command += ["--tokenizer-type", "GPT2BPETokenizer"]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.skipif("MEGATRON_CHECKOUT" not in os.environ, reason="MEGATRON_CHECKOUT isn't set")
@pytest.mark.parametrize("kind", ["GPT2BPETokenizer", "Llama2Tokenizer"])
def test_upstream_writes_the_same_bytes(tmp_path: Path, models: Path, kind: str) -> None:
    """Its own program, of a checkout of any release, which gets GPT-2's from a hub from 0.15 on."""
    source, checkout = tmp_path / "in.jsonl", Path(os.environ["MEGATRON_CHECKOUT"])
    texts = [*SCRIPTS, "", [], ["a", "", "b"], "x" * 9000, "<|endoftext|>", "word " * 9000]
    source.write_text("".join(json.dumps({"text": text}) + "\r\n" for text in texts))
    model = models / "spm.model" if kind == "Llama2Tokenizer" else None
    upstreams(checkout, source, tmp_path / "theirs", model)
    chosen = TokenizerChoice(kind, model=model, megatron=own_version(checkout))
    tokenize.run(
        TokenizeTask((str(source),), tmp_path / "ours", ReadingOptions(), chosen, append_eod=True),
        lambda done: None,
    )
    for suffix in (".bin", ".idx"):
        ours, theirs = (tmp_path / f"{one}_text_document{suffix}" for one in ("ours", "theirs"))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, Path]:
    """A vocabulary of the bytes, two merges and the end of a document."""
    return with_merges(tmp_path, ["a b", "ab c"])


def test_another_vocabulary_is_used_as_it_is(small: tuple[Path, Path]) -> None:
    found = of_files(*small)
    assert (found.size, found.end) == (259, 258)
    assert found.encode(["abcab abd"])[0].tolist() == [257, 256, 220 + 0, 256, 67]  # space: Ġ
    assert not vocabulary.load_vocabulary(*small).genuine
    special = ["<s>", "[PAD]", "<｜end｜>", "  ", *(f"<extra_{n}>" for n in range(200))]
    ids = json.loads(small[0].read_text())  # special tokens need no merge
    small[0].write_text(json.dumps(ids | {t: n for n, t in enumerate(special, len(ids))}))
    assert len(vocabulary.load_vocabulary(*small).ids) == 259 + 204


@table("file", "content", "said")
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
        assert of_files(vocab_file, merge_file).size == 259
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


def test_a_file_that_is_not_there_and_a_package_that_was_changed_are_told(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"absent: No such file"):
        vocabulary.load_vocabulary(small[0], small[0].with_name("absent"))
    monkeypatch.setitem(vocabulary.PACKAGED, "vocab.json", "__init__.py")
    with pytest.raises(UsageError, match=r"not GPT-2's vocab\.json, whose sha256 is 196139"):
        vocabulary.vocabulary_files(None, None)
