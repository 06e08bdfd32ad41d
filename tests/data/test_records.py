"""Documents of a block: how many faults are looked for, what they take and what is shown."""

from __future__ import annotations

import io

import pytest

from launcher.data import tables
from launcher.data.faults import excerpt
from launcher.data.records import Block, documents

BLOCKS = [
    Block(lines=b'{"text": "a"}\n{\n{"text": "b"}\n[]\n\n{}\n'),
    Block(rows=[["a"], [1], ["b"], [None], [""], [[2]]], numbers=range(1, 7)),
]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize(
    ("limit", "at", "texts"),
    [(1, [1], 1), (2, [1, 3], 2), (3, [1, 3, 5], None), (None, [1, 3, 5], None)],
)
def test_no_more_faults_are_collected_than_are_wanted(
    block: Block, limit: int | None, at: list[int], texts: int | None
) -> None:
    found = documents(block, ("text",), limit)
    assert [fault.at for fault in found.faults] == at
    assert found.records == at[-1] + 1
    assert [text for text in found.texts[0] if text] == ["a", "b"][:texts]


@pytest.mark.parametrize("other", [b"\f", b"\v", b" \x1c ", "\u00a0".encode(), "\u3000".encode()])
def test_only_spaces_and_tabs_are_an_empty_line(other: bytes) -> None:
    """A form feed alone was left out of jsonl, as if it were one, and upstream ends at it."""
    assert documents(Block(lines=b"\n \t\r\n\n"), ("text",), None).blank == 3
    (fault,) = documents(Block(lines=other + b"\n"), ("text",), None).faults
    assert fault.reason.startswith("not JSON")
    found = documents(Block(lines=b" \t\n" + other + b"\n", plain=True), ("text",), None)
    assert (found.blank, found.texts) == (1, [[other.decode()]])
    for unit in ("line", "paragraph", "file"):
        text = tables.Lines("", io.StringIO(f" \t\n\n{other.decode()}\n"), 99)
        rows = [row for _, row in tables.units(text, unit)]
        assert rows == [[" \t\n\n" * (unit == "file") + other.decode() + "\n" * (unit == "file")]]


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
    assert excerpt(b"\xff" * 300) == r"\xff" * 50  # what is no UTF-8 is shown
    assert excerpt("\udcff" * 300) == r"\udcff" * 33 + r"\u"
    assert excerpt(["it's", ["one", "b" * 300], 7]) == "it's, one, " + "b" * 189
