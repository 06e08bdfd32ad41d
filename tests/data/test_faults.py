"""What is shown and kept of a bad record."""

from __future__ import annotations

import pytest

from launcher.data.faults import excerpt


@pytest.mark.parametrize(
    ("record", "begins"),
    [
        ("中" * 300, "中" * 200),
        ("a" + "🙂" * 300, "a" + "🙂" * 199),
        ("é" * 5, "é" * 5),
    ],
)
def test_the_first_200_characters_are_kept(record: str, begins: str) -> None:
    assert excerpt(record) == excerpt(record.encode()) == excerpt([record]) == begins


def test_what_is_no_utf8_is_shown() -> None:
    assert excerpt(b"a\xff\xe4") == r"a\xff\xe4"
    assert excerpt("a\udcff") == r"a\udcff"
    assert excerpt(b"\xff" * 300) == r"\xff" * 50
    assert excerpt("\udcff" * 300) == r"\udcff" * 33 + r"\u"


def test_a_row_is_its_values() -> None:
    assert excerpt(["it's", "one", 7]) == "it's, one, 7"
    assert excerpt([["a", "b" * 300]]) == "a, " + "b" * 197
