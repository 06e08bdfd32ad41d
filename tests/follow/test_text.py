"""The text of a run: which vocabulary the model is made for, and what a dry run says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.follow.text import Tokenized, tokenized
from launcher.plan import source
from launcher.plan.config import Data
from tests.e2e.command import launcher


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("Hello world\n")
    return path


def given(name: str, text: Path, *settings: str, release: str | None = None) -> Tokenized:
    overrides = [source.parse_set(one) for one in (f"data.text={text}", *settings)]
    config, origin = source.load(name, overrides)
    return tokenized(config, origin, text.parent / "cache", lambda: release)


def data(name: str, text: Path, *settings: str) -> Data:
    return given(name, text, *settings).config.data


@pytest.mark.parametrize("name", ["gpt2-tiny.yaml", "demo.yaml", "gpt2.yaml"])
def test_a_presets_own_data_gives_way(text: Path, name: str) -> None:
    found = given(name, text)
    assert found.text
    assert found.config.data.path == str(found.text.prefix)
    assert (found.config.data.text, found.config.data.vocab_size) == (None, 50257)


def test_what_does_not_fit_the_text_is_refused(text: Path) -> None:
    with pytest.raises(UsageError) as caught:
        data("gpt2-tiny.yaml", text, "data.vocab_size=50256")
    assert "--set data.vocab_size=50256: data.vocab_size: 50256, and GPT2BPE" in str(caught.value)
    assert "give at least 50257" in str(caught.value)
    own = text.with_name("own.yaml")
    own.write_text("name: a\nimage: cpu\ndata:\n  vocab_size: 256\n")
    with pytest.raises(UsageError, match=r"own\.yaml:4: data\.vocab_size: 256, and"):
        data(str(own), text)
    assert data(str(own), text, "data.vocab_size=null").vocab_size == 50257
    assert data(str(own), text, "data.vocab_size=50304").vocab_size == 50304
    with pytest.raises(UsageError, match=r"data\.text and data\.path"):
        data("demo.yaml", text, "data.path=a")
    with pytest.raises(UsageError, match="--tokenizer-model: GPT2BPETokenizer doesn't read it"):
        data("gpt2-tiny.yaml", text, "data.tokenizer_model=tokenizer.json")


def test_the_image_says_whose_tokens_they_are(text: Path) -> None:
    """Other tokens lie elsewhere; the same, of another release, are taken."""
    releases = (None, "0.9.0", "0.14.0", "0.16.1", "0.19.0")
    found = [given("gpt2-tiny.yaml", text, release=release) for release in releases]
    prefixes = [one.config.data.path for one in found]
    assert [prefixes.index(one) for one in prefixes] == [0, 0, 0, 3, 3]


def test_a_dry_run_says_that_the_text_will_be_tokenized(text: Path, tmp_path: Path) -> None:
    command = ["run", "gpt2-tiny.yaml", "--dry-run", "--set", f"data.text={text}"]
    cache = {"LAUNCHER_CACHE": str(tmp_path / "cache"), "DOCKER_HOST": "unix:///nowhere.sock"}
    prefix = given("gpt2-tiny.yaml", text, release="0.16.1").text  # the release of the image
    assert prefix
    shown = launcher(*command, **cache)
    assert shown.returncode == 0, shown.stderr
    assert "--vocab-size 50257" in shown.stdout
    assert shown.stderr == (
        f"launcher: data.text: it will be tokenized first, to {prefix.prefix}.bin\n"
    )
    assert not (tmp_path / "cache").exists()
    prefix.make(lambda done: None)
    assert launcher(*command, **cache).stderr == ""
