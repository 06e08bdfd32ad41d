"""Which rows of known failures are tried where: all that can match, and at few lines each."""

from __future__ import annotations

import json
import re
from itertools import accumulate
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.runs.explain import anchors, failures
from tools.anchors import anchors as made
from tools.anchors import index

HERE = Path(__file__).parent
REAL: dict[str, list[str]] = yaml.safe_load((HERE / "said.yaml").read_text())
BESIDE: dict[str, str] = yaml.safe_load((HERE / "beside.yaml").read_text())
TEXTS = [*(text for texts in REAL.values() for text in texts), *BESIDE.values()]


def parts(text: str) -> dict[str, list[tuple[int, int]]]:
    starts = list(accumulate((len(line) + 1 for line in text.split("\n")), initial=0))
    return anchors.find(text, starts)


def test_the_file_is_made_of_the_rows() -> None:
    """A row changed and its anchors not would never be tried."""
    assert json.loads(anchors.ANCHORS.read_bytes()) == json.loads(json.dumps(index()))


@pytest.mark.parametrize(
    ("says", "texts", "lines"),
    [
        (r"\bXid (?:\(PCI:|Error\b)", ["Xid (PCI:", "Xid Error"], 0),
        (r"[Ll]oss is (?:nan)?", ["Loss is ", "loss is "], 0),
        (r"x+ failed\n(?:.*\n){0,4}?.*KeyError: ", ["KeyError: "], 5),
        (r"Error: .*too long", ["too long"], 0),
        (r"(?i:could not load) it", [" it"], 0),
        (r"(?s:Weights only.{0,99}?)operand", ["Weights only"], 64),
    ],
)
def test_anchors_of_an_expression(says: str, texts: list[str], lines: int) -> None:
    assert made((says,)) == (texts, lines)


def test_an_expression_without_an_anchor_is_refused() -> None:
    """It would have to be tried at each line of a log."""
    with pytest.raises(ValueError, match="no text is in all"):
        made((r"a text|\d+",))


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6), st.text(max_size=40))
def test_a_row_that_matches_is_tried_where_it_does(texts: list[str], noise: str) -> None:
    """An anchor hidden by another, or a part too short, would hide a cause."""
    text = f"\n{noise}\n".join(texts)
    found = parts(text)
    for known in failures.table():
        for match in re.finditer("|".join(known.says), text, re.MULTILINE):
            first, last = (text.count("\n", 0, at) for at in (match.start(), match.end() - 1))
            assert any(a <= first and last <= b for a, b in found[known.name])


def test_anchors_that_begin_or_overlap_one_another_are_all_found() -> None:
    for known in failures.table():
        for text in made(known.says)[0]:
            assert known.name in parts(f"a {text} b")


def test_lines_are_tried_by_the_rows_that_can_match_them() -> None:
    """All rows on all lines took 14 s for 4 MB of distinct lines."""
    lines = [f"{text} {number}" for number in range(40) for text in BESIDE.values()]
    text = "\n".join(lines)
    tried = sum(b - a + 1 for spans in parts(text).values() for a, b in spans)
    assert tried < 12 * text.count("\n")
