"""The forms of a request for GPUs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.errors import UsageError
from launcher.runs.runfile.values import Gpus, parse_gpus

ID = st.from_regex(re.compile(r"[0-9A-Za-z][\w:.-]{0,8}", re.ASCII), fullmatch=True)


@given(st.lists(ID, min_size=1, unique=True))
def test_devices_are_counted_and_kept_in_order(ids: list[str]) -> None:
    assert parse_gpus("device=" + ",".join(ids)) == Gpus(len(ids), tuple(ids))


def test_a_number_is_of_any_and_that_of_all_is_not_known_yet() -> None:
    assert parse_gpus(8) == parse_gpus("8") == Gpus(8)
    assert parse_gpus("all") == Gpus(None, everything=True)
    for text in ("8", "all", "device=0,1"):
        assert str(parse_gpus(text)) == text


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "device=", "device=0,", "device=0,0", "any", "0,1", "١", "device=0 1"]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="gpus: "):
        parse_gpus(text)
