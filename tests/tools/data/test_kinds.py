"""Inputs of other forms than lines: lists, Arrow, saved data sets, keys within keys, stand-ins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.runs.datasets import indexed
from launcher.runs.runfile import origins
from launcher.tools.data import array, contents, data_text, kinds, sources, tokenizers, vocabulary
from launcher.tools.data.faults import DataError
from launcher.tools.data.tokenizers import TokenizerChoice
from launcher.tools.weights import convert, safetensors
from tests.tools.data.test_sources import read

TEXTS = ["one", "two\nlines, “x”", "", "four" * 999]
RECORDS = [{"text": text, "content": {"text": text}} for text in TEXTS]
TABLE = pyarrow.table({"text": TEXTS, "content": [{"text": text} for text in TEXTS]})


def stream(path: Path) -> None:
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, TABLE.schema) as to:
        to.write_table(TABLE, max_chunksize=3)


WRITERS: dict[str, Any] = {
    "a.json": lambda path: path.write_text(json.dumps(RECORDS)),
    "indented.json": lambda path: path.write_text("\ufeff " + json.dumps(RECORDS, indent=2)),
    "b.jsonl": lambda path: path.write_text(json.dumps(RECORDS)),
    "c.feather": lambda path: pyarrow.feather.write_feather(TABLE, path),
    "d.arrow": stream,
    "e.parquet": lambda path: pyarrow.parquet.write_table(TABLE, path),
}


@pytest.mark.parametrize("key", ["text", "content.text"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_list_and_arrow_s_files_are_read_and_a_key_within_a_key(
    tmp_path: Path, name: str, key: str
) -> None:
    """They were "a list, where an object is wanted", "doesn't say what it is", "no key"."""
    WRITERS[name](tmp_path / name)
    assert read(tmp_path / name, keys=(key,)) == [[text] for text in TEXTS]


@given(st.lists(st.one_of(st.none(), st.integers(), st.text(), st.lists(st.text()))), st.data())
def test_a_list_is_read_as_python_reads_it_however_it_is_cut(found: list[Any], data: Any) -> None:
    """A piece may end within a number or a text."""
    whole = json.dumps(found, indent=data.draw(st.sampled_from([None, 2])), ensure_ascii=False)

    class Pieces:
        at = 0

        def read(self, size: int) -> str:
            size = data.draw(st.integers(1, 5))
            self.at += size
            return whole[self.at - size : self.at]

    pieces: Any = Pieces()
    lines = b"".join(array.lines("a.json", pieces, 1 << 20)).splitlines()
    assert [json.loads(line) for line in lines] == found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[{"text": "a"}, {"text"', "item 2 of its list: not JSON to its end"),
        ('[{"text": "a"} {"text": "b"}]', "item 2 of its list: '{' where a comma or ] is wanted"),
        ("[" + '{"text": "' + "x" * (3 << 20) + '"}]', "item 1 of its list: more than 2 MB"),
        ("[" * 100_000, "item 1 of its list: too many lists within lists"),
    ],
)
def test_a_broken_list_is_told_by_its_item(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=said.replace("[", r"\[")):
        read(tmp_path / "a.json", largest=sources.BLOCK)


def test_a_saved_data_set_is_read_and_one_of_several_splits_is_asked_for(tmp_path: Path) -> None:
    """It was "a folder: name its files"."""
    for split in ("test", "train"):
        (tmp_path / split).mkdir()
        stream(tmp_path / split / "data-00000-of-00001.arrow")
        stream(tmp_path / split / "cache-1.arrow")
        (tmp_path / split / "state.json").write_text("{}")
    (tmp_path / "dataset_dict.json").write_text("{}")
    assert read(tmp_path / "train") == [[text] for text in TEXTS]
    with pytest.raises(UsageError, match="several splits: test, train") as caught:
        read(tmp_path)
    assert caught.value.remedy == f"Name one: {tmp_path / 'test'}"


def test_a_damaged_arrow_file_is_told(tmp_path: Path) -> None:
    stream(tmp_path / "a.arrow")
    whole = (tmp_path / "a.arrow").read_bytes()
    (tmp_path / "a.arrow").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="can't be read"):
        read(tmp_path / "a.arrow")


def test_another_delimiter_is_noticed(tmp_path: Path) -> None:
    """`id;text` was "no column 'text': id;text"."""
    (tmp_path / "a.csv").write_text("id;text\n1;a\n")
    with pytest.raises(UsageError) as caught:
        read(tmp_path / "a.csv")
    assert caught.value.remedy == "--csv-delimiter ';'"
    assert read(tmp_path / "a.csv", delimiter=";") == [["a"]]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12345\n"


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    """It was "not JSON", "no tokenizer.json", "no safetensors, or cut short"."""
    path = tmp_path / "tokenizer.json"
    path.write_text(POINTER)
    chosen = TokenizerChoice("HuggingFaceTokenizer", model=path)
    for look in (
        lambda: read(path, format="jsonl"),
        lambda: tokenizers.load_tokenizer(chosen),
        lambda: vocabulary.load_vocabulary(path, path),
        lambda: safetensors.read_json(path),
        lambda: safetensors._header(path),
    ):
        with pytest.raises(UsageError, match="a pointer of git-lfs") as caught:
            look()
        assert "git lfs pull" in caught.value.remedy


def test_ranks_in_base64_and_an_adapter_are_named(tmp_path: Path) -> None:
    """They were "no SentencePiece model", "no list of rank, token_bytes", "no config.json"."""
    ranks = tmp_path / "tokenizer.model"
    ranks.write_text("IQ== 0\nIg== 1\nIw== 2\n")
    for kind in tokenizers.MODELS:
        with pytest.raises(UsageError, match="as tiktoken has it"):
            tokenizers.load_tokenizer(TokenizerChoice(kind, model=ranks))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match="an adapter of PEFT's"):
        convert.import_(tmp_path, tmp_path / "to")


def test_pages_of_html_are_no_data(tmp_path: Path) -> None:
    """A server's page for a login was "not JSON" in its first line."""
    (tmp_path / "a.jsonl").write_text("\n<!DOCTYPE html><html>")
    with pytest.raises(UsageError, match="a page of HTML"):
        read(tmp_path / "a.jsonl")


def test_a_list_is_known_by_its_beginning() -> None:
    """A line that is an object with a list in it is no list."""
    assert kinds.is_array(b"\xef\xbb\xbf\n [")
    assert not kinds.is_array(b'{"a": [')


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Data files, and how they were made."""
    indexed.write(tmp_path / "d", [[1, 2], [3]], 500)
    said = {"tokenizer": {"type": "HuggingFaceTokenizer", "model": str(tmp_path / "t.json")}}
    said |= {"documents": 2, "tokens": 3, "vocab_size": 500}  # type: ignore[dict-item]
    (tmp_path / "d.made.json").write_text(json.dumps(said))
    return tmp_path / "d"


@pytest.mark.parametrize(
    ("sets", "release", "tokenizer", "size"),
    [
        ((), "0.17.1", None, 500),
        (("data.vocab_size=600",), "0.17.1", None, 600),
        (("program=pretrain_gpt.py",), "0.17.1", "NullTokenizer", 499),
        (("program=pretrain_gpt.py",), "0.18.2", "NullTokenizer", 500),
        (("program=pretrain_gpt.py", "data.tokenizer_type=X"), "0.17.1", "X", 50257),
    ],
)
def test_tokenizer_and_vocabulary_are_those_that_made_the_data(
    made: Path, tmp_path: Path, sets: tuple[str, ...], release: str, tokenizer: str, size: int
) -> None:
    """A preset's 50257 was taken, and the data's own vocabulary was to be looked up by hand."""
    given = [origins.parse_set(one) for one in (f"data.path={made}", *sets)]
    found = data_text.tokenized(*origins.load("gpt2", given), tmp_path, lambda: release)
    assert (found.config.data.tokenizer_type, found.config.data.vocab_size) == (tokenizer, size)
    assert bool(found.note) == (size in (500, 499))
    (tmp_path / "t.json").touch()
    found = data_text.tokenized(*origins.load("gpt2", given), tmp_path, lambda: release)
    if tokenizer == "NullTokenizer":
        assert found.config.data.tokenizer_model == str(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("own", "size"),
    [
        ("mock: true, vocab_size: 256", 500),
        ("mock: true, vocab_size: 600", 600),
        ("mock: false, vocab_size: 256", 256),
    ],
)
def test_the_vocabulary_of_made_up_tokens_gives_way_in_a_file_of_one_s_own(
    made: Path, tmp_path: Path, own: str, size: int
) -> None:
    """What `launcher init` wrote was refused for the preset's 256 in it, once data.path was set."""
    (tmp_path / "mine.yaml").write_text(f"extends: gpt2\nname: a\ndata: {{{own}}}\n")
    given = origins.load(str(tmp_path / "mine.yaml"), [origins.parse_set(f"data.path={made}")])
    found = data_text.tokenized(*given, tmp_path, lambda: None)
    assert found.config.data.vocab_size == size


def test_the_vocabulary_of_made_up_tokens_gives_way_to_that_of_a_text(tmp_path: Path) -> None:
    """What `launcher init` wrote was refused for its 256 with data.text, and not with data.path."""
    (tmp_path / "t.txt").write_text("a text")
    own = f"mock: true, vocab_size: 256, text: [{tmp_path}/t.txt]"
    (tmp_path / "mine.yaml").write_text(f"name: a\nimage: cpu\ndata: {{{own}}}\n")
    given = origins.load(str(tmp_path / "mine.yaml"), [])
    assert data_text.tokenized(*given, tmp_path, lambda: None).config.data.vocab_size == 50257


def test_what_is_shown_of_data_is_decoded_by_its_own_tokenizer(made: Path) -> None:
    """`data inspect` took GPT-2's for any."""
    chosen = contents.made_by(contents.open_data(made))
    assert chosen == TokenizerChoice("HuggingFaceTokenizer", model=made.with_name("t.json"))
