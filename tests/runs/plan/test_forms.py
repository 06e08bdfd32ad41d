"""Forms of a value that people write, of a request for GPUs, and of a name that they mistype."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.runs.checks import checks
from launcher.runs.checks.machine import Dataset
from launcher.runs.runfile import origins
from launcher.runs.runfile.config import RunConfig
from launcher.runs.runfile.values import Gpus, parse_gpus
from tests.plans import load


def config(*sets: str) -> RunConfig:
    return load("gpt2-tiny", *sets)[0]


@pytest.mark.parametrize(
    ("given", "taken"),
    [("[949, 50, 1]", "949,50,1"), ("[0.9, 0.1]", "0.9,0.1"), ("90,10,0", "90,10,0")],
)
def test_a_split_may_be_a_list(given: str, taken: str) -> None:
    """It was "Input should be a valid string"."""
    assert config(f"data.split={given}").data.split == taken


def test_a_split_of_words_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.split: a list of shares takes numbers"):
        config("data.split=[most, few]")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("30 a 70 b", [30, "a", 70, "b"]),
        ("0.3 /x/a 0.7 b", [0.3, "/x/a", 0.7, "b"]),
        ("/my data/a", "/my data/a"),
        ("a", "a"),
        ("one a two b", "one a two b"),
    ],
)
def test_a_blend_may_be_one_string(given: str, taken: object) -> None:
    """Megatron's own form was taken for the name of one file."""
    assert config(f"data.path='{given}'").data.path == taken


def test_a_mistyped_path_is_answered_with_what_is_there(tmp_path: Path) -> None:
    """`conf/mien.yaml` was answered with a preset's name."""
    (tmp_path / "mine.yaml").touch()
    for name, remedy in (
        (str(tmp_path / "mien.yaml"), "Did you mean 'mine.yaml'"),
        (str(tmp_path / "none/mine.yaml"), f"There is no folder {tmp_path}/none."),
    ):
        with pytest.raises(UsageError) as caught:
            origins.find(name)
        assert caught.value.problem == f"{name}: no such file"
        assert caught.value.remedy.startswith(remedy)
    with pytest.raises(UsageError) as caught:
        origins.find("mien.yaml", tmp_path)
    assert caught.value.remedy.startswith("Did you mean 'mine.yaml'")


@pytest.mark.parametrize(
    ("sets", "release", "refused"),
    [
        (("program=pretrain_gpt.py", "data.tokenizer_type=NullTokenizer"), "0.17.1", False),
        (("program=pretrain_gpt.py", "data.tokenizer_type=NullTokenizer"), "0.18.2", True),
        (("program=pretrain_gpt.py",), "0.17.1", True),
        ((), "0.17.1", True),
    ],
)
def test_the_token_that_upstream_s_null_tokenizer_adds_is_counted(
    sets: tuple[str, ...], release: str, refused: bool
) -> None:
    """NullTokenizer with `vocab_size: 50256`, as upstream has it, was refused for token 50256.

    From 0.18 on it adds none, and its 50256 is refused.
    """
    data = [Dataset("/d", "", 10**6, 50256, 9)]
    found = checks._tokens_fit(*load("gpt2", "data.vocab_size=50256", *sets), data, release)
    assert bool([*found]) == refused


ID = st.from_regex(re.compile(r"[0-9A-Za-z][\w:.-]{0,8}", re.ASCII), fullmatch=True)


@given(st.lists(ID, min_size=1, unique=True))
def test_devices_are_counted_and_kept_in_order(ids: list[str]) -> None:
    assert parse_gpus("device=" + ",".join(ids)) == Gpus(len(ids), tuple(ids))


def test_a_number_of_gpus_is_of_any_and_that_of_all_is_not_known_yet() -> None:
    assert parse_gpus(8) == parse_gpus("8") == Gpus(8)
    assert parse_gpus("all") == Gpus(None, everything=True)
    for text in ("8", "all", "device=0,1"):
        assert str(parse_gpus(text)) == text


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "device=", "device=0,", "device=0,0", "any", "0,1", "١", "device=0 1"]
)
def test_what_is_no_request_for_gpus_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="gpus: "):
        parse_gpus(text)
